"""The system calls that a sandboxed program may not make, as a seccomp filter.

The filter is the second wall: namespaces, limits and missing capabilities stop most of these calls already. It keeps
code away from parts of the kernel that have a history of faults and that Python programs do not need, and closes what
namespaces and limits leave open: memory that belongs to no process (memfd, System V segments, shared mappings without a
file, pages in pipes, large buffers of sockets, partly unmapped huge pages), and sockets of other kinds than internet
and Unix ones, such as vsock, which reaches the host of a virtual machine.
"""

from __future__ import annotations

import errno
import platform
import struct

# name: (number on x86-64, number on arm64); None if the architecture has no such call.
_DENIED: dict[str, tuple[int, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "personality": (135, 92),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "vmsplice": (278, 75),
    "msgget": (68, 186),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
}
_CLONE, _CLONE3, _SOCKET, _MMAP, _PRCTL, _SETSOCKOPT = (56, 220), (435, 435), (41, 198), (9, 222), (157, 167), (54, 208)
_NEW_NAMESPACES = 0x7E020080
"""The CLONE_NEW... flags: namespaces for mounts, cgroups, host names, IPC, users, processes, network and time."""
_SOCKET_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, and both by force: the memory of a socket's buffers is counted with their default size."""
PR_SET_THP_DISABLE = 41
_MAP_ANONYMOUS = 0x20
_MAP_SHARED_OR_HUGETLB = 0x40001
"""Flags of mappings whose pages the memory of a process does not show: shared pages stay when a process unmaps all but
a part of them, and huge pages come from a pool of the machine."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables above, and the kernel's name of the architecture."""
_X32 = 0x40000000
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 24, 32, 40
"""Offsets in the kernel's `struct seccomp_data`, little-endian."""


def is_supported(machine: str | None = None) -> bool:
    """Whether there is a filter for this architecture."""
    return (machine or platform.machine()) in _ARCHITECTURES


def build_filter(machine: str | None = None) -> bytes:
    """The filter as an array of the kernel's `struct sock_filter`. Raises KeyError if this architecture has no
    filter."""
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    steps = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)),
        *((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)),
    ]
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    # clone3 has its flags in memory, invisible to a filter; without it, libraries call clone.
    steps += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    steps += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)),
    ]
    steps += [
        (_EQUAL, 0, 5, _MMAP[column]),
        (_LOAD, 0, 0, _FOURTH_ARGUMENT),
        *((_ANY_BIT, 0, 2, _MAP_ANONYMOUS), (_ANY_BIT, 0, 1, _MAP_SHARED_OR_HUGETLB)),
        *((_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)),
    ]
    steps += [
        *((_EQUAL, 0, 4, _PRCTL[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, PR_SET_THP_DISABLE)),
        *((_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)),
    ]
    sizes = len(_BUFFER_SIZES)
    steps += [
        *((_EQUAL, 0, sizes + 5, _SETSOCKOPT[column]), (_LOAD, 0, 0, _SECOND_ARGUMENT)),
        *((_EQUAL, 0, sizes + 1, _SOL_SOCKET), (_LOAD, 0, 0, _THIRD_ARGUMENT)),
        *((_EQUAL, sizes - at, 0, option) for at, option in enumerate(_BUFFER_SIZES)),
        *((_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)),
    ]
    families = len(_SOCKET_FAMILIES)
    steps += [(_EQUAL, 0, families + 2, _SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    steps += [(_EQUAL, families - at, 0, family) for at, family in enumerate(_SOCKET_FAMILIES)]
    steps += [(_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)

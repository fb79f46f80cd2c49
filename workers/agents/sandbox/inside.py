"""The process that builds sandboxes, one after another, each in three steps with fewer rights than the one before.

The process is a child of the one that called `run_python`. It forks a supervisor for each sandbox, which saves the
start of an interpreter, and shares nothing else.

1. The *supervisor* clones a process into new namespaces and writes its user map. When that process ends, or the owner
   pipe closes, it kills the rest and ends.
2. The *init* is process 1 of the new process namespace. It makes a separate root file system and leaves the host's.
   When it ends, the kernel kills every process in the namespace. It watches the memory of all of them.
3. The *program* gives up every right and becomes the interpreter that runs the code.

The request is JSON in a file descriptor (see `troupe.workers.agents.sandbox.run`). The answers are lines of JSON:
``{"started"}`` when the program starts and ``{"wait_status", "out_of_memory", "program_s"}`` when it has ended, or
``{"failure", "step", "errno"}`` if the sandbox could not be made. This module imports only what it needs, because
its start is part of the cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from troupe.workers.agents.sandbox.seccomp import PR_SET_THP_DISABLE, build_filter

INSIDE_ID = 1000
"""User and group of the program, inside."""
UNPRIVILEGED_ID = 65534
"""User and group of the program, outside, if the caller is root: the process limit does not bind root."""
WATCH_INTERVAL_MS = 25
DESCRIPTORS = 6
"""Descriptors that start a sandbox: the request, standard input, output and error, the status pipe, the owner pipe."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_CLONE_FLAGS = 0x7E020000  # new mount, cgroup, UTS, IPC, user, process and network namespaces
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_CAPABILITY_VERSION = 0x20080522

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "nix/store", "etc/ld.so.cache", "etc/alternatives")
"""What a program sees of the host, read-only, besides the interpreter: programs and libraries."""
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""The host's device behind each of the sandbox. A shared mapping of `zero` is memory that belongs to no process; `full`
reads as the same zeros and cannot be mapped."""

_SEND_BUFFER = 212_992
"""Bytes that a socket may hold unread, if the kernel does not show its default."""
_STREAM, _HELD, _QUEUED = "0001", 2, 12
"""Type of a stream in the list of Unix sockets, and most buffers that a stream and a socket for datagrams hold: the
last write begins while there is room, and ten datagrams wait for a reader, whose senders may be closed."""

# PyDLL keeps the interpreter lock during a call: after a clone there is no other thread that could give it back.
_libc = ctypes.PyDLL(None, use_errno=True)


class SetupError(Exception):
    """A step of the setup failed."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(f"{step}: {os.strerror(number)}")
        self.step, self.number = step, number


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """Name the step that an OSError belongs to."""
    try:
        yield
    except OSError as error:
        raise SetupError(name, error.errno or 0) from error


def _call(step: str, result: int) -> int:
    """The result of a call of the C library. Raises SetupError if the call failed."""
    if result < 0:
        raise SetupError(step, ctypes.get_errno())
    return result


def main() -> NoReturn:
    """Run programs, each in a sandbox, until the caller closes the socket whose descriptor is the argument. A message
    in it carries the descriptors of one sandbox (see `DESCRIPTORS`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the caller too, who closes the owner pipe
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    while len(descriptors := socket.recv_fds(requests, 1, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)[1]) == DESCRIPTORS:
        try:
            with _step("fork"):
                supervisor = os.fork()
            if supervisor == 0:
                requests.close()
                _supervise(*descriptors)
        except SetupError as error:
            _report(descriptors[4], {"failure": str(error), "step": error.step, "errno": error.number})
        else:
            os.waitpid(supervisor, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _supervise(request_fd: int, stdin: int, stdout: int, stderr: int, status: int, owner_pipe: int) -> NoReturn:
    """Run one program, and end when nothing of it is left."""
    try:
        _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        for standard, given in enumerate((stdin, stdout, stderr)):
            os.dup2(given, standard)
            os.close(given)
        with os.fdopen(request_fd, "rb") as file:
            request: dict[str, Any] = json.loads(file.read())
        _keep(request, status, owner_pipe)
    except SetupError as error:
        _report(status, {"failure": str(error), "step": error.step, "errno": error.number})
    finally:
        os._exit(0)


def _report(status: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(message).encode() + b"\n")


def _keep(request: dict[str, Any], status: int, owner_pipe: int) -> None:
    """Start the init, and stay until it has ended; kill it when the owner pipe closes."""
    _raise_memory_limit(request["limits"]["memory_mib"] * 2**20)
    ready_read, ready_write = os.pipe()
    caller = os.geteuid()
    drops_user = _can_drop_user()
    init = _call("clone", _libc.syscall(_CLONE[platform.machine()], _CLONE_FLAGS | signal.SIGCHLD, 0, 0, 0, 0))
    if init == 0:
        os.close(ready_write)
        os.close(owner_pipe)
        _init(request, status, ready_read, drops_user)
    os.close(ready_read)
    try:
        with _step("map users"):
            _map_users(init, caller, drops_user)
            os.write(ready_write, b"1")
        for descriptor in (0, 1, 2):  # or the supervisor would hold the program's output open
            os.close(descriptor)
        with _step("watch the sandbox"):
            ended = os.pidfd_open(init)
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            waiting.register(owner_pipe, select.POLLHUP)
            waiting.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)  # returns when every process of its namespace has been reaped


def _raise_memory_limit(wanted: int) -> None:
    """Make room for the program's own limit: the caller may have a lower one, and only root may raise it."""
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY and hard < wanted:
            try:
                resource.setrlimit(kind, (soft, wanted))
            except (OSError, ValueError) as error:
                raise SetupError("raise the memory limit", getattr(error, "errno", None) or 1) from error


def _can_drop_user() -> bool:
    """Whether the program can run as another user: root in a container may be an ordinary user outside."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as users, open("/proc/self/gid_map", encoding="ascii") as groups:
        maps = [[[int(number) for number in line.split()] for line in file] for file in (users, groups)]
    return all(any(start <= UNPRIVILEGED_ID < start + size for start, _, size in lines) for lines in maps)


def _map_users(init: int, caller: int, drops_user: bool) -> None:
    """Say who the users inside are outside. Only the caller exists otherwise."""
    if drops_user:
        lines = f"0 0 1\n{INSIDE_ID} {UNPRIVILEGED_ID} 1\n"
        maps = {"uid_map": lines, "gid_map": lines}
    else:
        maps = {"setgroups": "deny", "uid_map": f"{INSIDE_ID} {caller} 1\n"}
        maps["gid_map"] = f"{INSIDE_ID} {os.getegid()} 1\n"
    for name, text in maps.items():
        descriptor = os.open(f"/proc/{init}/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _init(request: dict[str, Any], status: int, ready: int, drops_user: bool) -> NoReturn:
    """Process 1: make the file system, start the program, and end with it."""
    try:
        _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.read(ready, 1) != b"1":  # the supervisor failed, or is dead
            os._exit(1)
        os.setsid()
        _call("prctl", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))  # no other process may read its memory or descriptors
        if drops_user:  # files that it makes belong to a user whom the namespace knows
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        _call("set the host name", _libc.sethostname(b"sandbox", 7))
        _make_root(request)
        _report(status, {"started": True})
        began = time.monotonic()
        with _step("fork"):
            program = os.fork()
        if program == 0:
            _become_program(request, status, drops_user)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        exceeded = _watch(program, request["limits"]["memory_mib"] * 2**20)
        _, wait_status = os.waitpid(program, 0)
        program_s = time.monotonic() - began
        _report(status, {"wait_status": wait_status, "out_of_memory": exceeded, "program_s": program_s})
    except SetupError as error:
        _report(status, {"failure": str(error), "step": error.step, "errno": error.number})
    finally:
        os._exit(0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [text and text.encode() for text in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), options and options.encode())
    _call(f"mount {kind or source or ''} on {target}", result)


def _protect(target: str, recursive: int = _AT_RECURSIVE) -> None:
    """Make a mount and, if recursive, all mounts below it read-only, without devices and set-uid programs."""
    structure = (ctypes.c_uint64 * 4)(_MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    arguments = (-100, target.encode(), recursive, ctypes.byref(structure), ctypes.c_size_t(32))
    _call(f"protect {target}", _libc.syscall(_MOUNT_SETATTR, *arguments))


def _bind(path: str) -> None:
    """Show a file or folder of the host, which is at /old here, at the same place, read-only."""
    source, target = f"/old/{path}", f"/new/{path}"
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if not os.path.exists(source) or os.path.exists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _protect(target)


def _pivot(root: str, old: str) -> None:
    _call("pivot_root", _libc.syscall(_PIVOT_ROOT[platform.machine()], root.encode(), old.encode()))
    os.chdir("/")


def _make_root(request: dict[str, Any]) -> None:
    """Make a root file system in memory that holds what the program may see, and leave the host's."""
    os.umask(0o022)
    limits = request["limits"]
    with _step("make the root file system"):
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
        for name in ("/tmp/old", "/tmp/new"):
            os.mkdir(name)
        _pivot("/tmp", "/tmp/old")
        _mount("tmpfs", "/new", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
        for name in ("proc", "tmp", "dev", "etc", "program", "old"):
            os.mkdir(f"/new/{name}")
        # Before the folders: the interpreter may be installed in /tmp.
        size = f"mode=1777,size={limits['disk_mib']}m,nr_inodes={limits['files'] + 1}"
        _mount("tmpfs", "/new/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
        for path in (*_SYSTEM, *(folder.lstrip("/") for folder in request["folders"])):
            _bind(path)
        _make_devices()
        _write_files(request)
        _mount("proc", "/new/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid,hidepid=invisible")
        _pivot("/new", "/new/old")
        _call("leave the host's file system", _libc.umount2(b"/old", _MNT_DETACH))
        os.rmdir("/old")
        _protect("/", recursive=0)
        os.chdir("/tmp")


def _make_devices() -> None:
    for name, source in _DEVICES.items():
        os.close(os.open(f"/new/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"/old/dev/{source}", f"/new/dev/{name}", None, _MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/new/dev/{name}")
    os.symlink("/proc/self/fd", "/new/dev/fd")
    os.symlink("/tmp", "/new/dev/shm")


def _write_files(request: dict[str, Any]) -> None:
    """Write the program, and the names of the only user and group."""
    files = {f"program/{name}.py": text for name, text in request["modules"].items()}
    files["etc/passwd"] = f"sandbox:x:{INSIDE_ID}:{INSIDE_ID}::/tmp:/bin/sh\n"
    files["etc/group"] = f"sandbox:x:{INSIDE_ID}:\n"
    for name, text in files.items():
        with open(f"/new/{name}", "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)


def _watch(program: int, limit: int) -> bool:
    """Wait for the program. Returns whether it was killed because its processes and sockets exceeded the limit."""
    waiting = select.poll()
    waiting.register(os.pidfd_open(program), select.POLLIN)
    while not waiting.poll(WATCH_INTERVAL_MS):
        if _used_memory() + _socket_memory() > limit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything in this namespace but the init itself
            return True
    return False


def _used_memory() -> int:
    """Private memory of all processes but this one, in bytes. Shared memory is in files, within the disk's limit."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/statm", encoding="ascii") as file:
                _, resident, shared, *_ = map(int, file.read().split())
                pages += max(0, resident - shared)
    return pages * os.sysconf("SC_PAGE_SIZE")


def _socket_memory() -> int:
    """Bytes that the buffers of all Unix sockets may hold; also of sockets that no process has open: sent to another
    one, or waiting to be accepted. Internet sockets have nobody to send to."""
    with open("/proc/1/net/unix", encoding="utf-8", errors="replace") as file:
        kinds = [columns[4] for line in file if len(columns := line.split()) > 4][1:]
    streams = kinds.count(_STREAM)
    return (_HELD * streams + _QUEUED * (len(kinds) - streams)) * _send_buffer


def _default_send_buffer() -> int:
    try:
        with open("/proc/sys/net/core/wmem_default", encoding="ascii") as file:
            return int(file.read())
    except OSError:  # kernels show it to the first network namespace only
        return _SEND_BUFFER


_send_buffer = _default_send_buffer()


def _become_program(request: dict[str, Any], status: int, drops_user: bool) -> NoReturn:
    """Give up every right and start the interpreter."""
    try:
        os.dup2(status, 3, inheritable=False)
        with _step("start the program"):
            os.setsid()
            _call("prctl", _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))  # or its own entry in /proc would be closed to it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
                file.write("1000")
            _limit(request["limits"], 0 if drops_user else 1)
            _drop_rights(drops_user)
            os.closerange(4, 2**31 - 1)
            _call("prctl", _libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))  # unmapped but for a page, one would stay whole
            _filter_calls()
            os.execve(request["command"][0], request["command"], request["environment"])
    except SetupError as error:
        _report(3, {"failure": str(error), "step": error.step, "errno": error.number})
    finally:
        os._exit(1)


def _limit(limits: dict[str, Any], own_processes: int) -> None:
    """Set the limits of a process; `own_processes` of the sandbox itself count as the program's."""
    memory, disk, seconds = limits["memory_mib"] * 2**20, limits["disk_mib"] * 2**20, int(limits["timeout_s"]) + 2
    wanted = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_DATA: (memory, memory),
        resource.RLIMIT_CPU: (seconds, seconds),
        resource.RLIMIT_NPROC: (limits["processes"] + own_processes,) * 2,
        resource.RLIMIT_FSIZE: (disk, disk),
        resource.RLIMIT_NOFILE: (limits["open_files"], limits["open_files"]),
        resource.RLIMIT_CORE: (1, 1),  # with 0, a core_pattern that is a program would still be started
        resource.RLIMIT_STACK: (2**23, 2**26),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for kind, (soft, hard) in wanted.items():
        inherited = resource.getrlimit(kind)[1]
        if inherited != resource.RLIM_INFINITY:
            soft, hard = min(soft, inherited), min(hard, inherited)
        resource.setrlimit(kind, (soft, hard))


def _drop_rights(drops_user: bool) -> None:
    """Become the program's user, without any capability and without a way to get one."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if drops_user:
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capset", _libc.capset(ctypes.byref(header), ctypes.byref(none)))
    _call("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_calls() -> None:
    instructions = build_filter()
    rules = _Filter(len(instructions) // 8, instructions)
    _call("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(rules), 0, 0))

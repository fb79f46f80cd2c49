"""Peak memory of processes, reported in `troupe.workers.contract.messages.Answer`."""

from __future__ import annotations

from collections.abc import Iterable

_GROWTH = 1.05
"""Growth of a process's peak after which its shared pages are counted again."""


def resident_peak(others: Iterable[int] = ()) -> int:
    """Peak resident bytes of this process and `others`; one that has ended counts as 0."""
    return sum(_high_water(pid) for pid in ("self", *others))


class FamilyPeak:
    """Peak resident memory of a process and its forked descendants. Pages that several hold count once, in equal
    parts. Shared memory is left out: weights in it belong to no process."""

    def __init__(self) -> None:
        self._known: dict[int | str, tuple[int, int]] = {}
        """Peak of each process and its part to leave out, when it was last read: all pages are walked for it."""

    def read(self, others: Iterable[int]) -> int:
        """Bytes of this process and of the processes `others`; a process that has ended counts as 0."""
        return sum(self._own(pid) for pid in ("self", *others))

    def _own(self, pid: int | str) -> int:
        peak = _high_water(pid)
        known, shared = self._known.get(pid, (0, 0))
        if peak > _GROWTH * known:
            shared = _shared(pid)
            self._known[pid] = (peak, shared)
        return max(0, peak - shared)


def _high_water(pid: int | str) -> int:
    """VmHWM in bytes. (`ru_maxrss` starts with the peak of the parent process.)"""
    return sizes(pid, "status").get("VmHWM:", 0)


def _shared(pid: int | str) -> int:
    """Bytes of a process that are shared memory, or belong to other processes that hold the same pages."""
    held = sizes(pid, "smaps_rollup")
    return held.get("Rss:", 0) - held.get("Pss:", 0) + held.get("Pss_Shmem:", 0)


def sizes(pid: int | str, file: str) -> dict[str, int]:
    """The sizes in a file of /proc; empty if the process has ended or its maps may not be read."""
    try:
        with open(f"/proc/{pid}/{file}", errors="replace") as lines:  # the name of a process may be cut in a character
            parts = [line.split() for line in lines]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return {part[0]: int(part[1]) * 1024 for part in parts if len(part) == 3 and part[2] == "kB"}

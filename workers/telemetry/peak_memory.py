"""Peak memory of processes, reported in `troupe.workers.contract.messages.Answer`."""

from __future__ import annotations

from collections.abc import Iterable


def resident_peak(others: Iterable[int] = ()) -> int:
    """Peak resident bytes of this process plus those of the processes `others`; a process that has ended counts as
    0."""
    return sum(_high_water(pid) for pid in ("self", *others))


def _high_water(pid: int | str) -> int:
    """VmHWM in bytes. (`ru_maxrss` starts with the peak of the parent process.)"""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as status:  # the name of a process may be cut in a character
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0

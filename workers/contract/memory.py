"""The most memory that processes have held, for the answers that tell it (`workers.messages.Answer`)."""

from __future__ import annotations

from collections.abc import Iterable


def resident_peak(others: Iterable[int] = ()) -> int:
    """Bytes of this process and of the processes `others`, each at its own peak; one that is gone counts nothing."""
    return sum(_high_water(pid) for pid in ("self", *others))


def _high_water(pid: int | str) -> int:
    """VmHWM, in bytes. (`ru_maxrss` would start with the peak of the process that started this one.)"""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0

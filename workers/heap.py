"""What the C library does with memory that tensors on the CPU no longer need."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt: blocks of so many bytes are had from the system one by one."""


def return_freed() -> None:
    """Have the C library give memory of tensors back to the system as soon as it is freed. Only glibc knows the call.

    By default it keeps most of it in pieces between others that are in use; under ZeRO-3, which makes and drops tensors
    all the time, a quarter of the peak is such pieces (`python -m benchmarks.plan_memory`). What is given back has to
    be had again, which takes time: not where memory is not what one is short of. The opposite, keeping everything, lets
    a process grow without end where batches differ in shape (docs/profiles.md).
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)

"""What the C library does with memory that tensors on the CPU no longer need. Only glibc knows the calls."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1


def keep_freed() -> None:
    """Keep what is freed, in this process, for the next tensor.

    By default blocks of more than 32 MiB go back to the system at once, and the next one of the size is had page by
    page anew, each filled with zeros. A step's activations and logits are such blocks, and writing them for the first
    time takes several times as long as computing them. What a process holds stays at its peak.
    """
    _mallopt(_M_MMAP_MAX, 0)
    _mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed() -> None:
    """Give memory of tensors back to the system as soon as it is freed.

    By default the library keeps most of it in pieces between others that are in use; under ZeRO-3, which makes and
    drops tensors all the time, a quarter of the peak is such pieces (`python -m benchmarks.plan_memory`). What is given
    back has to be had again, which takes time: not where memory is not what one is short of.
    """
    _mallopt(_M_MMAP_THRESHOLD, 2**20)


def return_kept() -> None:
    """Give back what was kept so far, once."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(option, value)

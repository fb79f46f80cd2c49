"""A bound on the processor time of a call in this process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_STEP_S = 0.05
"""Interval at which the time of a call is checked."""


class _Ended(BaseException):
    """Raised in the thread of a call that takes too long. Code that expects an Exception does not catch it."""


class _Call(threading.Thread):
    """A call on a separate thread."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(name="time-limit", daemon=True)
        self._function, self._args = function, args
        self.result: Any = None
        self.error: Exception | None = None
        self._clock: int | None = None

    def run(self) -> None:
        """Call the function."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        with suppress(_Ended):
            try:
                self.result = self._function(*self._args)
            except Exception as error:
                self.error = error

    def cpu_s(self) -> float:
        """Processor time of the thread so far."""
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # it has ended since
            return 0.0

    def end(self) -> None:
        """Raise an exception in the thread; it ends when it next runs Python code."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(_Ended))


def within(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Return or raise as `function(*args)` does, unless it takes longer than `seconds` of processor time.

    Time in which other threads or processes run does not count, so a busy machine gives the same result. The caller
    does not wait for a call that cannot be ended at once.

    Raises:
        TimeoutError: it takes longer.
    """
    call = _Call(function, args)
    call.start()
    call.join(_STEP_S)
    while call.is_alive():
        if call.cpu_s() > seconds:
            call.end()
            raise TimeoutError(f"it is not done after {seconds:g} s of processor time")
        call.join(_STEP_S)
    if call.error is not None:
        raise call.error
    return call.result

"""SIGINT, SIGTERM and SIGHUP before a run handles them itself: code 130 and one line, in the first second too.

Imports very little: the command line sets the first handlers before it loads anything else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

STOPPED = 130
"""Exit code of a command that was asked to stop."""
STOPPED_LINE = "stopped"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS_S = 0.5
"""Longest wait of the main thread without a look for signals."""


def exit_on_signals() -> None:
    """A signal ends this process at once, until work has begun that must be ended in order."""
    _handle(_exit)


def interrupt_on_signals() -> None:
    """A signal raises KeyboardInterrupt in the main thread, so that what has begun is ended in order."""
    _handle(_interrupt)


def taken() -> bool:
    """Whether these signals are this module's: not within another program, or in a thread that receives none."""
    ours = signal.getsignal(signal.SIGTERM) in (_exit, _interrupt)
    return ours and threading.current_thread() is threading.main_thread()


@contextmanager
def held_back() -> Iterator[None]:
    """A signal during the block raises KeyboardInterrupt at its end: an import can swallow it, and keeps its lock."""
    if not taken():
        yield
        return
    received: list[int] = []
    _handle(lambda number, _: received.append(number))
    try:
        yield
    finally:
        interrupt_on_signals()
    if received:
        raise KeyboardInterrupt


def ignored(number: int) -> bool:
    """Whether this is SIGHUP under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _handle(handler: signal._HANDLER) -> None:
    for number in HANDLED:
        if not ignored(number):
            signal.signal(number, handler)


def _exit(number: int, _: object) -> NoReturn:
    os.write(2, f"{STOPPED_LINE}\n".encode())
    os._exit(STOPPED)


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt

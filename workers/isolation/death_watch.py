"""A process that ends with another one, which need not be its parent."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Sequence


def exit_with(owner: int, between: Sequence[int] = ()) -> None:
    """Exit when the process `owner` ends, and kill the processes `between` it and this one.

    A pidfd becomes readable when its process ends, also if nobody reaps it: under a PID 1 that does not, a dead
    process keeps its id for good, and a test for the id finds it alive. It never refers to another process that reuses
    the id.
    """
    try:
        owner_fd = os.pidfd_open(owner)
        others = [os.pidfd_open(pid) for pid in between]
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(owner_fd, others), name=f"exit with {owner}", daemon=True).start()


def _exit_after(owner_fd: int, others: Sequence[int]) -> None:
    waiting = select.poll()
    waiting.register(owner_fd, select.POLLIN)
    waiting.poll()
    for fd in others:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(1)

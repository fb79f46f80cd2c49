"""Ranks of a group without Ray: a process for each, which calls one function."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Self

from benchmarks.support.harness import NotCorrect

_JOIN_S = 30.0


class Ranks:
    """Processes that call `work(rank, meeting, *args)`; the first rank puts into `meeting` where they meet."""

    def __init__(self, count: int, work: Callable[..., Any], *args: Any) -> None:
        """Starts them."""
        context = multiprocessing.get_context("spawn")
        self._queues = context.Queue(), context.Queue()  # kept: without them their semaphores are gone for the ranks
        self._processes = [
            context.Process(target=_rank, args=(work, rank, *self._queues, args)) for rank in range(count)
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until they have ended, and kills those that do not."""
        for process in self._processes:
            process.join(timeout=_JOIN_S)
            if process.is_alive():
                process.kill()

    def results(self, timeout_s: float) -> list[Any]:
        """What every rank returned. Raises NotCorrect with the traceback of one that failed."""
        found = [self._queues[1].get(timeout=timeout_s) for _ in self._processes]
        if failed := [text for text in found if isinstance(text, str)]:
            raise NotCorrect(failed[0])
        return found


def reset_peak() -> None:
    """Reset VmHWM of this process to the memory that is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _rank(work: Callable[..., Any], rank: int, meeting: Queue[Any], results: Queue[Any], args: tuple[Any, ...]) -> None:
    """Main function of a process: puts what `work` returns, or a traceback, into `results`."""
    try:
        results.put(work(rank, meeting, *args))
    except BaseException:
        results.put(traceback.format_exc())

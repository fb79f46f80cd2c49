"""Child processes for the baselines, and meters of CPU time."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks.support.harness import Turn
from troupe.workers.contract.config import CPU_THREADS

RAY_NICENESS = int(os.environ.get("RAY_worker_niceness", "0"))  # noqa: SIM112 (Ray spells it so)
"""Niceness of the product's Ray workers (`orchestrator/cluster/ray_nodes.py`).

Baselines run at the same niceness; otherwise other load on the machine would favour one side.
"""
_GRACE_S = 5.0


class ChildFailed(RuntimeError):
    """A child process raised, did not answer in time, or has exited."""


class RemoteObject:
    """An object in a separate process, called by method name; `close` ends the process and its descendants."""

    def __init__(self, name: str, server: type, *args: Any) -> None:
        """Start the process without waiting for it; it builds `server(*args)` at its first call."""
        context = multiprocessing.get_context("spawn")
        os.environ |= CPU_THREADS  # as the product's workers; read when torch is imported, so it must be inherited
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, server, args), name=name)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id. Raises ChildFailed where the process was not started."""
        if self._process.pid is None:
            raise ChildFailed(f"{self._name} was not started")
        return self._process.pid

    def send(self, method: str, *args: Any) -> None:
        """Start a call without waiting for its answer."""
        self._pipe.send((method, args))

    def receive(self, timeout_s: float) -> Any:
        """Wait for the answer to the oldest pending call.

        Raises:
            ChildFailed: The method raised, no answer came within `timeout_s`, or the process has exited.
        """
        if not self._pipe.poll(timeout_s):
            raise ChildFailed(f"{self._name} gave no answer in {timeout_s:g} s")
        try:
            ok, answer = self._pipe.recv()
        except EOFError:
            raise ChildFailed(f"{self._name} has exited") from None
        if not ok:
            raise ChildFailed(f"{self._name} raised:\n{answer}")
        return answer

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call and wait. Raises ChildFailed."""
        self.send(method, *args)
        return self.receive(timeout_s)

    def close(self) -> None:
        """End the process and its descendants. Safe to call twice."""
        with contextlib.suppress(psutil.NoSuchProcess):
            end([psutil.Process(self.pid)])
        self._process.join(_GRACE_S)
        self._pipe.close()


def _serve(pipe: Connection, server: type, args: tuple[Any, ...]) -> None:
    """Main loop of the child: answer calls from `pipe` until the parent closes it, then end all descendants.

    A call blocks the loop until its method returns; an exception is sent back as a traceback. SIGTERM ends the process
    in order: multiprocessing then removes its semaphores, which it would report as leaked at the end of the parent.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.nice(max(0, RAY_NICENESS - os.nice(0)))
    built: Any = None
    try:
        while True:
            method, arguments = pipe.recv()
            try:
                built = server(*args) if built is None else built
                answer = True, getattr(built, method)(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    except (EOFError, OSError):
        pass
    finally:
        end(psutil.Process().children())
        util: Any = multiprocessing.util
        util._exit_function()
        util._flush_std_streams()
        os._exit(0)  # the destructor of an engine fails while the interpreter ends


def end(processes: Iterable[psutil.Process]) -> None:
    """End processes and their descendants: SIGTERM first, so that engines can clean up, then SIGKILL."""
    doomed: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed += [process, *process.children(recursive=True)]
    for signal_process in (psutil.Process.terminate, psutil.Process.kill):
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                signal_process(process)
        _, doomed = psutil.wait_procs(doomed, timeout=_GRACE_S)


def cpu_seconds(roots: Iterable[int], without: Sequence[int] = ()) -> float:
    """CPU seconds so far of the process trees of `roots`, excluding the trees of `without`.

    The time of an exited process counts in its parent.
    """
    return _cpu_seconds(_trees(roots, without))


def _trees(roots: Iterable[int], without: Sequence[int]) -> list[psutil.Process]:
    """The processes of the trees of `roots`, excluding the trees of `without`."""
    left_out = {process.pid for root in without for process in _tree(root)}
    return [process for root in roots for process in _tree(root) if process.pid not in left_out]


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def stopped(roots: Iterable[int], without: Sequence[int] = ()) -> Iterator[None]:
    """Suspend the process trees of `roots`, excluding this process and the trees of `without`, within the context.

    An idle cluster uses about a tenth of a core, which would slow down the contender whose turn it is.
    """
    left_out = {os.getpid(), *(process.pid for root in without for process in _tree(root))}
    processes = [process for root in roots for process in _tree(root) if process.pid not in left_out]
    with contextlib.ExitStack() as stack:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                stack.callback(_resume, process)
        yield


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


class Meter:
    """Time and CPU time of one contender's process trees, and other load on the machine, since it was created."""

    def __init__(self, roots: Sequence[int] | None = None, without: Sequence[int] = ()) -> None:
        """`roots`: the trees that count, or None for this process and its descendants."""
        self._roots, self._without = [os.getpid()] if roots is None else roots, without
        self._own = cpu_seconds(self._roots, without)
        self._machine = _machine_busy_s()
        self._began = time.monotonic()

    def read(self) -> tuple[float, float]:
        """(CPU seconds, average number of cores busy with other processes).

        Where this process is among them, its search for them, some 10 ms, does not count.
        """
        began = time.thread_time()
        processes = _trees(self._roots, self._without)
        searched_s = time.thread_time() - began if os.getpid() in self._roots else 0.0
        own = _cpu_seconds(processes) - self._own - searched_s
        elapsed = time.monotonic() - self._began
        return own, max(0.0, (_machine_busy_s() - self._machine - own) / elapsed)

    def turn(
        self,
        amount: float,
        wall_s: float | None = None,
        phases: dict[str, float] | None = None,
        figures: dict[str, float] | None = None,
    ) -> Turn:
        """What was measured as a turn; `wall_s`: the seconds that count, or None for all since the start."""
        wall_s = time.monotonic() - self._began if wall_s is None else wall_s
        return Turn(wall_s, amount, *self.read(), phases or {}, figures or {})


class SurvivorMeter:
    """A `Meter` for a contender whose processes are killed: counts only the processes that are alive at `read`."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._own = _each(roots)
        self._machine = _machine_busy_s()
        self._began = time.monotonic()

    def read(self) -> tuple[float, float]:
        """(CPU seconds, average number of cores busy with other processes)."""
        own = sum(seconds - self._own.get(process, 0.0) for process, seconds in _each(self._roots).items())
        elapsed = time.monotonic() - self._began
        return own, max(0.0, (_machine_busy_s() - self._machine - own) / elapsed)


def _each(roots: Iterable[int]) -> dict[psutil.Process, float]:
    """CPU seconds so far of each process in the trees of `roots`, excluding its exited children."""
    found: dict[psutil.Process, float] = {}
    for process in (process for root in roots for process in _tree(root)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process] = times.user + times.system
    return found


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice

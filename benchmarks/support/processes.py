"""Processes of the baselines, and what processes cost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from workers.config import CPU_THREADS

RAY_NICENESS = int(os.environ.get("RAY_worker_niceness", "0"))  # noqa: SIM112 (Ray spells it so)
"""The product has Ray run its workers at this niceness (`orchestrator/ray_nodes.py`). The baselines run at the same, or
whatever else runs here would favour one side."""


_GRACE_S = 5.0


class ChildFailed(RuntimeError):
    """A baseline's process raised, or is gone."""


class Child:
    """An object in a process of its own, called by method name. Its process and all below it end with `close`."""

    def __init__(self, name: str, server: type, *args: Any) -> None:
        """Start the process; it makes `server(*args)` and then answers calls. Nothing waits for that yet."""
        context = multiprocessing.get_context("spawn")
        os.environ |= CPU_THREADS  # as the product's workers; read when torch is imported, so it must be inherited
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, server, args), name=name)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id. Raises ChildFailed before it has one."""
        if self._process.pid is None:
            raise ChildFailed(f"{self._name} was not started")
        return self._process.pid

    def send(self, method: str, *args: Any) -> None:
        """Start a call."""
        self._pipe.send((method, args))

    def receive(self, timeout_s: float) -> Any:
        """The answer to the oldest call under way. Raises ChildFailed."""
        if not self._pipe.poll(timeout_s):
            raise ChildFailed(f"{self._name} gave no answer in {timeout_s:g} s")
        try:
            ok, answer = self._pipe.recv()
        except EOFError:
            raise ChildFailed(f"{self._name} is gone") from None
        if not ok:
            raise ChildFailed(f"{self._name} raised:\n{answer}")
        return answer

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call and wait. Raises ChildFailed."""
        self.send(method, *args)
        return self.receive(timeout_s)

    def close(self) -> None:
        """End the process and all below it; safe to call twice."""
        with contextlib.suppress(psutil.NoSuchProcess):
            end([psutil.Process(self.pid)])
        self._process.join(_GRACE_S)
        self._pipe.close()


def _serve(pipe: Connection, server: type, args: tuple[Any, ...]) -> None:
    """Answer calls until the other side is gone; then leave nothing behind."""
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


def end(processes: Iterable[psutil.Process]) -> None:
    """End processes and all below them: asked first, so that engines clean up after themselves, and then killed."""
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
    """CPU seconds so far of these processes and all below them, but not of `without` and those below them.

    A process that ended counts in its parent.
    """
    left_out = {process.pid for root in without for process in _tree(root)}
    total = 0.0
    for process in (process for root in roots for process in _tree(root)):
        if process.pid not in left_out:
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
    """These processes and all below them, but for this one and for `without` and those below, stand still.

    An idle cluster still costs about a tenth of a core, and that would be the next contender's loss.
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
    """CPU seconds of one contender, and cores busy with anything else, since it was made."""

    def __init__(self, roots: Sequence[int], without: Sequence[int] = ()) -> None:
        self._roots, self._without = roots, without
        self._own = cpu_seconds(roots, without)
        self._machine = _machine_busy_s()
        self._began = time.monotonic()

    def read(self) -> tuple[float, float]:
        """(CPU seconds, cores busy with something else on average)."""
        own = cpu_seconds(self._roots, self._without) - self._own
        elapsed = time.monotonic() - self._began
        return own, max(0.0, (_machine_busy_s() - self._machine - own) / elapsed)


class SurvivorMeter:
    """As :class:`Meter`, for a contender of which processes are killed: only those that are left at the end count."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._own = _each(roots)
        self._machine = _machine_busy_s()
        self._began = time.monotonic()

    def read(self) -> tuple[float, float]:
        """(CPU seconds, cores busy with something else on average)."""
        own = sum(seconds - self._own.get(process, 0.0) for process, seconds in _each(self._roots).items())
        elapsed = time.monotonic() - self._began
        return own, max(0.0, (_machine_busy_s() - self._machine - own) / elapsed)


def _each(roots: Iterable[int]) -> dict[psutil.Process, float]:
    """CPU seconds so far of each of these processes and of each below them, without those that it outlived."""
    found: dict[psutil.Process, float] = {}
    for process in (process for root in roots for process in _tree(root)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process] = times.user + times.system
    return found


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice

"""The session of a run: a cluster and workers, from their start to an orderly end. Every kind of run is a function
of one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_server import server_of
from troupe.orchestrator.data.prompt_check import PromptCheck
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.hub.resolve import LocalFiles, fetch
from troupe.orchestrator.insight.why.observer import RunObserver
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.live.scaling import CLOSE_TIMEOUT_S
from troupe.orchestrator.plan.placement import role_sizes, room
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.table import SAMPLERS
from troupe.orchestrator.signals import HANDLED, ignored, interrupt_on_signals, taken
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.digests import evaluation_digest, reward_digest
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EVALUATION, REWARDS, recorded_failure
from troupe.orchestrator.telemetry.versions import versions as describe_versions
from troupe.orchestrator.training.batch import unless_failed, unless_stopped
from troupe.workers.contract.roles import Worker

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SAME_SIGNAL_S = 0.5


class StopSwitch:
    """Asks a run in another thread to save and exit."""

    def __init__(self) -> None:
        self._stop: Callable[[], object] | None = None
        self._asked = False

    def connect(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """The run's event, and the loop that it belongs to. A run that was asked to stop before stops at once."""
        self._stop = partial(loop.call_soon_threadsafe, stop.set)
        if self._asked:
            stop.set()

    def stop(self) -> None:
        """Asks the run to stop."""
        self._asked = True
        if self._stop is not None:
            with suppress(RuntimeError):  # its loop is closed: the run has ended
                self._stop()


@dataclass(frozen=True)
class RunRequest:
    """The user's request."""

    spec: RunSpec
    """With every name on the hub pinned to a commit."""
    out: Path
    resume: bool
    address: str | None
    classes: Mapping[str, type[Worker]] = field(default_factory=dict)
    """Worker classes to start instead of the classes of the table of roles, by its rows."""
    switch: StopSwitch = field(default_factory=StopSwitch)
    """Stops the run from another thread."""


def _facts(spec: RunSpec) -> dict[str, object]:
    """Facts of a run: workers by role, and versions of the packages; and how it evaluates and rewards."""
    versions = dict(line.split(" ", 1) for line in describe_versions().splitlines())
    roles = {size.role: size.workers for size in role_sizes(spec)}
    digests = {EVALUATION: evaluation_digest(spec), REWARDS: reward_digest(spec)}
    return {"name": spec.name, "roles": roles, "versions": versions, **digests}


def say(console: Console, lines: Sequence[str]) -> None:
    """Shows lines on the console."""
    for line in lines:
        console.message(line)


@dataclass(frozen=True)
class Session:
    """A cluster with the workers of a run, and the services that they are used with."""

    spec: RunSpec
    """With models that are folders."""
    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    console: Console
    stop: asyncio.Event
    """Set when the run must save and exit."""
    observer: RunObserver | None = None
    """Answers `troupe why`, or None if the run does not train."""

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """Awaits `work`. Raises StopRequested if the run is to stop."""
        return await unless_stopped(self.stop, work)


@asynccontextmanager
async def open_session(
    request: RunRequest,
    console: Console,
    *,
    local: LocalFiles[RunSpec] | None = None,
    roles: frozenset[str] | None = None,
    resume_at: int | None = None,
    checks: asyncio.Task[PromptCheck] | None = None,
) -> AsyncIterator[Session]:
    """Starts a cluster and the workers of all roles (or of `roles`); all of it ends with the block.

    Args:
        request: The run.
        console: Shows the start.
        local: The spec with models that are folders, or None to fetch what it names.
        roles: Roles to start, or None for all.
        resume_at: Steps that the run has completed, or None to record and observe nothing, as this is no training.
        checks: Checks the data during the start. If they fail, the start ends; otherwise they may go on in the block.
    """
    local = local or fetch(request.spec, console)
    console.phase("start Ray", 0, 1)
    with _connected(request, roles) as cluster:
        stop = asyncio.Event()
        with (
            _observed(request, resume_at, console, cluster) as observer,
            _interrupts(cluster, stop, request.switch),
            recorded_failure(cluster.events),
        ):
            launcher = WorkerLauncher(local.spec, cluster, local.snapshots, request.classes)
            reporting = nullcontext if observer is None else observer.reporting
            with reporting():
                workers = await unless_stopped(stop, _launch(request.spec, launcher, roles, console, checks))
            try:
                with reporting():
                    yield Session(local.spec, cluster, launcher, workers, console, stop, observer)
            finally:
                console.phase("close", 0, 1)
                await cluster.close(CLOSE_TIMEOUT_S)


@contextmanager
def _connected(request: RunRequest, roles: frozenset[str] | None) -> Iterator[Cluster]:
    """A cluster with room for the run, whose workers are watched."""
    engines = roles is None or any(name in roles for name in SAMPLERS)
    server = server_of(request.spec, request.address) if engines else None
    cluster = Cluster.connect(room(request.spec), request.address, server)
    try:
        cluster.watch(request.spec.failures.stopped_s)
        yield cluster
    except WorkerError as error:
        error.add_note(f"worker logs: {cluster.logs}")
        raise
    finally:
        cluster.abandon()


@contextmanager
def _observed(
    request: RunRequest, resume_at: int | None, console: Console, cluster: Cluster
) -> Iterator[RunObserver | None]:
    """Records the events of a run that trains, and answers `troupe why` about it."""
    if resume_at is None:
        yield None
        return
    events = cluster.events
    events.open(request.out, resume_at)
    events.record("run_started", **_facts(request.spec), capacity=cluster.capacity(), resume_at=resume_at)
    observer = RunObserver(request.out, request.spec.name, console, cluster)
    try:
        yield observer
    finally:
        observer.close()
        events.close()


async def _launch(
    spec: RunSpec,
    launcher: WorkerLauncher,
    roles: frozenset[str] | None,
    console: Console,
    checks: asyncio.Task[PromptCheck] | None,
) -> Workers:
    """Starts the workers, unless the checks fail first."""
    started = [size for size in role_sizes(spec) if roles is None or size.role in roles]
    console.message("starting " + ", ".join(f"{size.workers} {size.role}" for size in started))
    opened = launcher.open(roles, partial(console.phase, "start workers"))
    return await (opened if checks is None else unless_failed(checks, opened))


@contextmanager
def _interrupts(cluster: Cluster, stop: asyncio.Event, switch: StopSwitch) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP (a closed terminal) saves and exits; the second one exits immediately.

    One that follows within `_SAME_SIGNAL_S` is the same request: Ray's job manager sends it to a supervisor and to the
    run, and the supervisor passes it on.

    SIGHUP stays ignored if it is, as under `nohup`. The others are handled even if a shell ignores SIGINT for a
    command in the background of a script.

    Within another program, its own handlers are back afterwards. Outside of the main thread there are no signals, and
    the program has the switch.
    """
    loop = asyncio.get_running_loop()
    switch.connect(loop, stop)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in HANDLED if not ignored(number)]
    before = {} if taken() else {number: signal.getsignal(number) for number in handled}
    received: list[float] = []

    def on_signal(number: int) -> None:
        received.append(loop.time())
        if stop.is_set():
            if received[-1] - received[0] < _SAME_SIGNAL_S:
                return
            cluster.abandon()
            os._exit(128 + number)
        logger.warning("stopping: saving first; press again to exit immediately")
        stop.set()

    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if not before:
            interrupt_on_signals()

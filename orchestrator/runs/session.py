"""The session of a run: its folder, its data, a cluster and workers, from their start to an orderly end. Every kind of
run is a function of one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_server import server_of
from troupe.orchestrator.data.prompt_check import COUNTED, PROMPTS, PromptCheck, check_prompts
from troupe.orchestrator.data.remote import copies_shown
from troupe.orchestrator.data.summary import Pools, RunData, describe, load_data
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError, WorkerError
from troupe.orchestrator.hub.resolve import LocalFiles, fetch
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.live.lock import kept, locked
from troupe.orchestrator.live.scaling import CLOSE_TIMEOUT_S
from troupe.orchestrator.plan.placement import RoleSize, place, role_sizes, room
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.table import SAMPLERS
from troupe.orchestrator.runs.checkpoints import RunCheckpoints, open_checkpoints
from troupe.orchestrator.runs.opponents import fetch_opponent, opponent_step, with_opponent
from troupe.orchestrator.runs.resume import require_same_rows, resumption
from troupe.orchestrator.signals import HANDLED, ignored, interrupt_on_signals, taken
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.spec.derived.digests import evaluation_digest, reward_digest
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EVALUATION, REWARDS, EventLog, recorded_failure
from troupe.orchestrator.telemetry.versions import versions as describe_versions
from troupe.orchestrator.training.batch import unless_failed, unless_stopped
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.workers.contract.roles import Worker
from troupe.workers.contract.units import MIB

if TYPE_CHECKING:
    from troupe.orchestrator.insight.why.observer import RunObserver

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SAME_SIGNAL_S = 0.5
_HURRY_S = 2.0
"""Timeout for closing the workers of a run that was asked to stop; what holds one up ends with its process."""


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
    for line in lines:
        console.message(line)


@dataclass(frozen=True)
class Session:
    """A cluster with the workers of a run, and the services that they are used with."""

    request: RunRequest
    spec: RunSpec
    """With models that are folders."""
    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    console: Console
    stop: asyncio.Event
    """Set when the run must save and exit."""
    checkpoints: RunCheckpoints
    read: RunData | None = None
    """The data sets, or None if this kind of run reads none."""
    observer: RunObserver | None = None
    """Answers `troupe why`, or None if the run does not train."""

    @property
    def data(self) -> RunData:
        """The data sets. Raises TroupeError if none are read."""
        if self.read is None:
            raise TroupeError("this kind of run reads no data")
        return self.read

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
    reads: bool = False,
    trains: bool = False,
) -> AsyncIterator[Session]:
    """Opens checkpoints and data, then a cluster and the workers of all roles (or of `roles`); all of it ends with
    the block. `local`: the spec with folders as models. `trains`: the run locks its folder, reads its data,
    renders the prompts while the workers start, records events, and answers `troupe why`."""
    async with AsyncExitStack() as stack:
        checkpoints = await stack.enter_async_context(_run_folder(request, console)) if trains else _saved(request)
        start = stack.enter_context(ExitStack())
        if trains:
            start.enter_context(_recorded_start(request.out, checkpoints.done))
        local = local or fetch(request.spec, console)
        if trains and checkpoints.remote is not None:
            fetch_opponent(local.spec, checkpoints.store, checkpoints.remote, checkpoints.done)
        if step := opponent_step(local.spec, checkpoints.store, checkpoints.done) if trains else 0:
            checkpoints.store.use(step)
            spec, digest = with_opponent(local.spec, checkpoints.store, step)
            local = replace(local, spec=spec)
            console.message(f"the opponent is the model of step {step}, digest {digest[:16]}")
        with copies_shown(lambda name, done, all_: console.phase(f"copy {name}", done // MIB, all_ // MIB, unit="MiB")):
            data = load_data(local.spec) if reads or trains else None
        checks = None
        if data is not None and trains:
            require_same_rows(checkpoints.found, data.drawn)
            checks = _check(local.spec, data.pools, console)
        elif data is not None:
            say(console, describe(data.pools))
        console.phase("start Ray")
        cluster, stop = stack.enter_context(_connected(request, roles)), asyncio.Event()
        start.close()  # the cluster's events follow
        observer = stack.enter_context(_observed(request, checkpoints.done, console, cluster)) if trains else None
        stack.enter_context(_interrupts(cluster, stop, request.switch))
        stack.enter_context(recorded_failure(cluster.events))
        launcher = WorkerLauncher(local.spec, cluster, local.snapshots, request.classes)
        reporting = nullcontext if observer is None else observer.reporting
        first_of = cluster if checkpoints.found is None else None
        with reporting():
            workers = await unless_stopped(stop, _launch(request.spec, launcher, roles, console, checks, first_of))
        stack.push_async_callback(_close_workers, cluster, console, stop)
        stack.enter_context(reporting())
        if data is not None and checks is not None:
            data = replace(data, refused=(await unless_stopped(stop, checks)).refused)
        yield Session(
            request, local.spec, cluster, launcher, workers, console, stop, checkpoints, read=data, observer=observer
        )


@contextmanager
def _recorded_start(out: Path, done: int) -> Iterator[None]:
    """Records how the block ended if it raises, before the events of a run are open."""
    events = EventLog()
    events.step = done
    try:
        with recorded_failure(events):
            yield
    except BaseException:
        events.open(out, sys.maxsize)  # leaves the events of earlier starts
        events.close()
        raise


@asynccontextmanager
async def _run_folder(request: RunRequest, console: Console) -> AsyncIterator[RunCheckpoints]:
    """The checkpoints of a run in a folder that no other run uses, with the spec of a new run or the changes to it."""
    spec, out = request.spec, request.out
    out.mkdir(parents=True, exist_ok=True)
    file = out / RESOLVED_SPEC
    with locked(out) as lock, kept(lock, file):
        checkpoints = open_checkpoints(spec, out, request.resume)
        if checkpoints.found is None:
            spec.write(file)
            if request.resume:
                say(console, [f"nothing to resume in {out}: starting from the beginning"])
        else:
            say(console, resumption(out, checkpoints.found, spec, file).lines())
        say(console, [f"warning: {line}" for line in warnings_of(spec)])
        try:
            yield checkpoints
        finally:  # threads that write to the folder end before its lock
            await asyncio.get_running_loop().shutdown_default_executor()


def _saved(request: RunRequest) -> RunCheckpoints:
    """The newest checkpoint in the run folder, if the run uses one. Raises UsageError if there is none."""
    store = CheckpointStore(request.out / "checkpoints", request.spec.checkpoint.keep)
    found = store.latest() if request.resume else None
    if request.resume and found is None:
        raise UsageError(f"{request.out}: there is no valid checkpoint; name the spec instead")
    return RunCheckpoints(store, found)


def _check(spec: RunSpec, pools: Pools, console: Console) -> asyncio.Task[PromptCheck]:
    """Starts to render the first prompts of each section in another process, while the workers start."""
    loop, most = asyncio.get_running_loop(), PROMPTS if spec.rollouts is None else COUNTED
    rendering = loop.run_in_executor(None, check_prompts, spec, pools, most)
    return loop.create_task(_usable(pools, rendering, console))


async def _usable(pools: Pools, rendering: Awaitable[PromptCheck], console: Console) -> PromptCheck:
    """Shows what the data are, and which of the rendered prompts cannot be used."""
    found = await rendering
    if found.problems:
        raise UsageError("\n".join(f"{field}: {problem}" for field, problem in found.problems))
    say(console, [*describe(pools), *found.lines])
    return found


async def _close_workers(cluster: Cluster, console: Console, stop: asyncio.Event) -> None:
    console.phase("close")
    if not stop.is_set():
        with suppress(StopRequested):
            return await unless_stopped(stop, cluster.close(CLOSE_TIMEOUT_S))
    await cluster.close(_HURRY_S)


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
def _observed(request: RunRequest, done: int, console: Console, cluster: Cluster) -> Iterator[RunObserver]:
    """Records the events of a run that has completed `done` steps, and answers `troupe why` about it."""
    from troupe.orchestrator.insight.why.observer import RunObserver

    events = cluster.events
    events.open(request.out, done)
    events.record("run_started", **_facts(request.spec), capacity=cluster.capacity(), resume_at=done)
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
    first_of: Cluster | None,
) -> Workers:
    """Starts the workers, unless the checks fail first. `first_of`: the cluster of a first start, which
    fails without room. Later, a node may be away for a while, and the start waits."""
    started = [size for size in role_sizes(spec) if roles is None or size.role in roles]
    console.message("starting " + ", ".join(f"{size.workers} {size.role}" for size in started))
    opened = launcher.open(roles, partial(console.phase, "start workers"))
    if first_of is not None:
        opened = _if_possible(first_of, started, console, opened)
    return await (opened if checks is None else unless_failed(checks, opened))


async def _if_possible(
    cluster: Cluster, sizes: Sequence[RoleSize], console: Console, work: Coroutine[object, object, T]
) -> T:
    """Awaits `work`, which is cancelled if the cluster will never have room for roles of these sizes."""
    watch = asyncio.create_task(cluster.refuse_impossible(place(sizes), console.phase))
    try:
        return await unless_failed(watch, work)
    finally:
        watch.cancel()


@contextmanager
def _interrupts(cluster: Cluster, stop: asyncio.Event, switch: StopSwitch) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP saves and exits; the second exits immediately, but not within
    `_SAME_SIGNAL_S`: Ray's job manager signals supervisor and run, and the supervisor passes it on. SIGHUP stays
    ignored if it is (`nohup`), others are handled even if a shell ignores SIGINT in the background. Afterwards
    another program's handlers are back; outside of the main thread there are no signals, only the switch."""
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

"""One run from a spec to its outcome: start the cluster and the workers, run the controller, shut down in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from troupe.orchestrator.plan.placement import role_sizes, room
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.data.examples import load_examples
from troupe.orchestrator.data.mixture import drawn_rows
from troupe.orchestrator.data.prompt_check import COUNTED, PROMPTS, PromptCheck, check_prompts
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.data.summary import Pools, describe, named_examples
from troupe.orchestrator.errors import UsageError, WorkerError
from troupe.orchestrator.hub.resolve import LocalFiles, fetch
from troupe.orchestrator.insight.why.observer import RunObserver
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.live.scaling import CLOSE_TIMEOUT_S
from troupe.orchestrator.runs.offline import OfflineRun
from troupe.orchestrator.runs.resume import require_same_rows, resumption
from troupe.orchestrator.roles.table import SAMPLERS
from troupe.orchestrator.roles.table import named as named_roles
from troupe.orchestrator.runs.rollouts import AuditReport, RolloutRun
from troupe.orchestrator.run_checkpoints import RunCheckpoints, open_checkpoints
from troupe.orchestrator.runs.context import RunContext
from troupe.orchestrator.runs.lock import kept, locked
from troupe.orchestrator.signals import HANDLED, ignored, interrupt_on_signals, taken
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.checks.machine import RESOLVED_SPEC
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EVALUATION, REWARDS, recorded_failure
from troupe.orchestrator.training.batch import unless_failed, unless_stopped
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointStore
from troupe.orchestrator.telemetry.versions import versions as describe_versions
from troupe.orchestrator.cluster.worker_server import server_of
from troupe.workers.contract.roles import Worker

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


AUDIT = "audit.json"
"""File of a run folder with the report of the audit at its start."""


def run(request: RunRequest, console: Console) -> RunOutcome:
    """Trains as the spec specifies.

    Raises:
        TroupeError: The run cannot start or cannot continue, with one clear message.
    """
    request.out.mkdir(parents=True, exist_ok=True)
    with locked(request.out) as lock, kept(lock, request.out / RESOLVED_SPEC):
        return _run(request, console)


def _run(request: RunRequest, console: Console) -> RunOutcome:
    """Trains in a folder that no other run uses."""
    spec, checkpoints = request.spec, open_checkpoints(request.spec, request.out, request.resume)
    file = request.out / RESOLVED_SPEC
    if checkpoints.found is None:
        spec.write(file)
    else:
        say(console, resumption(request.out, checkpoints.found, spec, file).lines())
    say(console, [f"warning: {line}" for line in spec.warnings()])
    if spec.rollouts is None:
        return asyncio.run(_train_offline(request, spec.offline, console, checkpoints))
    return asyncio.run(_train_on_rollouts(request, spec.rollouts, console, checkpoints))


def audit(request: RunRequest, console: Console) -> AuditReport:
    """Compares sampler and trainer with plain float32 transformers, without training.

    One engine and the policy are started. With `request.resume`, the policy loads the newest checkpoint in the run
    folder, and its weights are pushed to the engine as the run pushes them.

    Raises:
        UsageError: The spec has no rollouts, or the folder no checkpoint.
    """

    if request.spec.rollouts is None:
        raise UsageError("the run has no rollouts: there is no sampler to compare with the trainer")
    spec = one_engine(request.spec.rollouts)
    found = CheckpointStore(request.out / "checkpoints", spec.checkpoint.keep).latest() if request.resume else None
    if request.resume and found is None:
        raise UsageError(f"{request.out}: there is no valid checkpoint to audit; name the spec instead")
    return asyncio.run(_audit(replace(request, spec=spec), spec, console, found))


def one_engine(spec: RolloutSpec) -> RolloutSpec:
    """The spec of an audit: one engine unless engines share the policy's GPUs."""
    rollout = spec.roles.rollout
    if rollout.colocate_with is None:
        rollout = rollout.model_copy(update={"workers": 1, "min_workers": 1, "max_workers": None, "autoscale": None})
    roles = spec.roles.model_copy(update={"rollout": rollout})
    return spec.model_copy(update={"roles": roles})


async def _audit(request: RunRequest, spec: RolloutSpec, console: Console, found: Checkpoint | None) -> AuditReport:
    local = fetch(spec, console)
    data = load_data(local.spec)
    async with open_run(request, local, console, named_roles(lambda row: row.audited)) as context:
        parts = RolloutRun(local.spec, request.out, context, data)
        try:
            await parts.start()
            return await unless_stopped(context.stop, parts.audit(local.spec, found))
        finally:
            await parts.close()


async def _train_on_rollouts(
    request: RunRequest, spec: RolloutSpec, console: Console, checkpoints: RunCheckpoints
) -> RunOutcome:
    local = fetch(spec, console)
    data = load_data(local.spec)
    require_same_rows(checkpoints.found, data.drawn)
    checks = _check_data(console, local.spec, data.pools, COUNTED)
    async with open_run(request, local, console, resume_at=checkpoints.done, checks=checks) as context:
        data = replace(data, refused=(await unless_stopped(context.stop, checks)).refused)
        parts = RolloutRun(spec, request.out, context, data)
        if context.observer is not None:
            context.observer.queues = parts.queues
        try:
            await parts.start()
            controller = await parts.controller(checkpoints)
            if checkpoints.found is not None:  # the resume stands
                spec.write(request.out / RESOLVED_SPEC)
            if spec.audit.at_start:
                report = await unless_stopped(context.stop, parts.audit(local.spec, checkpoints.found, controller))
                say(console, report.lines())
                (request.out / AUDIT).write_text(json.dumps(report.as_json(), indent=1) + "\n")
                report.require()
            parts.listen()
            return await controller.run()
        finally:
            await parts.close()


async def _train_offline(
    request: RunRequest, spec: OfflineSpec, console: Console, checkpoints: RunCheckpoints
) -> RunOutcome:
    local = fetch(spec, console)
    examples = load_examples(local.spec)
    require_same_rows(checkpoints.found, partial(drawn_rows, "data.train", examples[0]))
    checks = _check_data(console, local.spec, named_examples(*examples))
    async with open_run(request, local, console, resume_at=checkpoints.done, checks=checks) as context:
        await unless_stopped(context.stop, checks)
        controller = await OfflineRun(spec, request.out, context).controller(examples, checkpoints)
        if checkpoints.found is not None:  # the resume stands
            spec.write(request.out / RESOLVED_SPEC)
        return await controller.run()


async def evaluate_offline(request: RunRequest, spec: OfflineSpec, console: Console) -> dict[str, float]:
    """Metrics of the spec's model on held-out examples: the trainers compute the loss of their algorithm, with the
    reference if it has one. Raises UsageError if the spec names no such data."""
    local = fetch(spec, console)
    examples, held_out = load_examples(local.spec) if spec.data.eval is not None else (None, None)
    if examples is None or held_out is None:
        raise UsageError("the spec has no data.eval: there are no held-out examples to evaluate on")
    say(console, describe(named_examples(examples, held_out)))
    async with open_run(request, local, console) as context:
        evaluator = await unless_stopped(context.stop, OfflineRun(spec, request.out, context).evaluator(held_out))
        running = evaluator.run(0, lambda done, total: console.phase("evaluate", done, total))
        return await unless_stopped(context.stop, running)


def _check_data(console: Console, spec: RunSpec, pools: Pools, most: int = PROMPTS) -> asyncio.Task[PromptCheck]:
    """Starts to render the first `most` prompts of each section in another process, while the workers start."""
    loop = asyncio.get_running_loop()
    rendering = loop.run_in_executor(None, check_prompts, spec, pools, most)
    return loop.create_task(_usable(console, pools, rendering))


async def _usable(console: Console, pools: Pools, rendering: Awaitable[PromptCheck]) -> PromptCheck:
    """Says what the data are, and which of the rendered prompts cannot be used.

    Raises:
        UsageError: No prompt can be used with the model.
    """
    found = await rendering
    if found.problems:
        raise UsageError("\n".join(f"{field}: {problem}" for field, problem in found.problems))
    say(console, [*describe(pools), *found.lines])
    return found


def _facts(spec: RunSpec) -> dict[str, object]:
    """Facts of a run: workers by role, and versions of the packages; and how it evaluates and rewards."""
    versions = dict(line.split(" ", 1) for line in describe_versions().splitlines())
    roles = {size.role: size.workers for size in role_sizes(spec)}
    digests = {EVALUATION: spec.evaluation_digest(), REWARDS: spec.reward_digest()}
    return {"name": spec.name, "roles": roles, "versions": versions, **digests}


def say(console: Console, lines: Sequence[str]) -> None:
    """Shows lines on the console."""
    for line in lines:
        console.message(line)


@asynccontextmanager
async def open_run(
    request: RunRequest,
    local: LocalFiles[RunSpec],
    console: Console,
    roles: frozenset[str] | None = None,
    resume_at: int | None = None,
    checks: asyncio.Task[PromptCheck] | None = None,
) -> AsyncIterator[RunContext]:
    """A cluster with the workers of all roles (or of `roles`) running; all of it ends with the block.

    Args:
        request: The run.
        local: Its spec, with models that are folders.
        console: Shows the start.
        roles: Roles to start, or None for all.
        resume_at: Steps that the run has completed, or None to record and observe nothing, as this is no training.
        checks: Checks the data during the start. If they fail, the start ends; otherwise they may go on in the block.
    """
    console.phase("start Ray", 0, 1)
    engines = roles is None or any(name in roles for name in SAMPLERS)
    server = server_of(request.spec, request.address) if engines else None
    cluster = Cluster.connect(room(request.spec), request.address, server)
    if resume_at is not None:
        cluster.events.open(request.out, resume_at)
        cluster.events.record("run_started", **_facts(request.spec), capacity=cluster.capacity(), resume_at=resume_at)
    cluster.watch(request.spec.failures.stopped_s)
    stop = asyncio.Event()
    observer = None if resume_at is None else RunObserver(request.out, request.spec.name, console, cluster)
    try:
        with _interrupts(cluster, stop, request.switch), recorded_failure(cluster.events):
            launcher = WorkerLauncher(local.spec, cluster, local.snapshots, request.classes)
            started = [size for size in role_sizes(request.spec) if roles is None or size.role in roles]
            console.message("starting " + ", ".join(f"{size.workers} {size.role}" for size in started))
            with nullcontext() if observer is None else observer.reporting():
                opened = launcher.open(roles, partial(console.phase, "start workers"))
                workers = await unless_stopped(stop, opened if checks is None else unless_failed(checks, opened))
            try:
                with nullcontext() if observer is None else observer.reporting():
                    yield RunContext(cluster, launcher, workers, console, stop, observer)
            finally:
                console.phase("close", 0, 1)
                await cluster.close(CLOSE_TIMEOUT_S)
    except WorkerError as error:
        error.add_note(f"worker logs: {cluster.logs}")
        raise
    finally:
        cluster.events.close()
        cluster.abandon()
        if observer is not None:
            observer.close()


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

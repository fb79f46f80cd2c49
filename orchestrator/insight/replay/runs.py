"""Replays a run: starts its trainers and repeats steps, or starts its engines too and samples the groups of a step
again. There are no rewards and no loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from troupe.orchestrator.data.mixture import group_settings
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.hub.resolve import fetch
from troupe.orchestrator.insight.replay.against import Difference, difference, replay_there
from troupe.orchestrator.insight.replay.plan import ReplayPlan, steps_of
from troupe.orchestrator.insight.replay.repeat import Repeated, Replayer, software_changes, start_problem
from troupe.orchestrator.insight.replay.resample import Resampled, ResamplePlan, compare_samples
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.table import SAMPLERS, TRAINERS
from troupe.orchestrator.rollouts.scheduler import group_request
from troupe.orchestrator.rollouts.weight_sync import weight_sync
from troupe.orchestrator.runs.context import RunContext
from troupe.orchestrator.runs.session import RunRequest, open_run
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.rollout import GroupSettings, RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.batch import GroupOrigin, unless_stopped
from troupe.orchestrator.training.checkpoint import load_checkpoint
from troupe.orchestrator.training.step_recorder import software
from troupe.orchestrator.training.updates import OfflineUpdates, RolloutUpdates, Updates
from troupe.workers.contract.roles import TableRef

Each = Callable[[Repeated], bool]
"""Called with every step that was repeated; returns whether the replay continues."""


@dataclass(frozen=True)
class ReplayRequest:
    """What the user asked for."""

    run: Path
    plan: ReplayPlan
    address: str | None = None
    whole: bool = False
    """Whether the digest of each parameter is taken."""


@dataclass(frozen=True)
class ReplayOutcome:
    """What a replay found."""

    steps: tuple[Repeated, ...]
    start_problem: str
    """Why the first weights are not the run's; empty if they are."""
    software: tuple[str, ...]
    """Software whose version here differs from the run's."""

    @property
    def equal(self) -> bool:
        """Whether the replay had the weights of the run at its start and after every step."""
        return not self.start_problem and all(step.equal for step in self.steps)


def replay(request: ReplayRequest, console: Console, each: Each) -> ReplayOutcome:
    """Repeats the steps of a plan.

    Args:
        request: The plan, and what to find out.
        console: Shows the progress.
        each: Called with every step.

    Raises:
        TroupeError: The trainers do not start, or a step cannot be repeated.
    """
    return asyncio.run(_replay(request, console, each))


async def _replay(request: ReplayRequest, console: Console, each: Each) -> ReplayOutcome:
    plan, timeout_s = request.plan, request.plan.spec.schedule.train_timeout_s
    local = fetch(plan.spec, console)
    run = RunRequest(plan.spec, request.run, resume=False, address=request.address)
    async with open_run(run, local, console, frozenset(TRAINERS)) as context:
        updates = _updates(plan.spec, context.workers, console)
        console.message(f"repeating {steps_of(plan.folders)} from {plan.origin}")
        if plan.checkpoint is not None:
            await load_checkpoint(plan.checkpoint, updates.trainers, timeout_s)
        replayer = Replayer(updates, context.cluster.put, timeout_s)
        first = plan.folders[0].kept
        wrong = start_problem(first.before, await replayer.digests(), plan.origin)
        done: list[Repeated] = []
        for folder in plan.folders:
            done.append(await unless_stopped(context.stop, replayer.repeat(folder, request.whole)))
            if not each(done[-1]):
                break
    changes = software_changes(plan.folders[-1].kept.software, software())
    return ReplayOutcome(tuple(done), wrong, tuple(changes))


@dataclass(frozen=True)
class Comparison:
    """A replay with this code and one with another checkout."""

    steps: int
    """Repeated by both."""
    difference: Difference | None
    """None if the weights are equal after every step."""


def compare(request: ReplayRequest, checkout: Path, console: Console, each: Each) -> Comparison:
    """Repeats the steps of a plan with another checkout, then with this code until the weights differ.

    Args:
        request: The plan.
        checkout: Folder of the other code (`require_checkout`).
        console: Shows the progress.
        each: Called with every step that this code has repeated.

    Raises:
        TroupeError: One of the replays failed.
    """
    schedule, steps = request.plan.spec.schedule, request.plan.folders
    timeout_s = schedule.start_timeout_s + schedule.step_timeout_s * len(steps)
    with tempfile.TemporaryDirectory(prefix="troupe-replay-") as temporary:
        console.message(f"repeating {steps_of(steps)} with {checkout}")
        other = replay_there(checkout, request.run, steps[-1].kept.step, Path(temporary), timeout_s)
    by_step = {step.step: step for step in other.steps}
    if missing := [folder.kept.step for folder in steps if folder.kept.step not in by_step]:
        raise TroupeError(f"{checkout} has not repeated step {missing[0]}")

    def until_different(step: Repeated) -> bool:
        each(step)
        return difference(step, by_step[step.step]) is None

    done = replay(replace(request, whole=True), console, until_different).steps
    return Comparison(len(done), difference(done[-1], by_step[done[-1].step]))


def resample(run: Path, plan: ResamplePlan, address: str | None, console: Console) -> Resampled:
    """Samples the groups of a step again, with the weights that sampled them.

    Args:
        run: Folder of the run.
        plan: What to sample.
        address: Ray cluster to join, or None for a local one.
        console: Shows the progress.

    Raises:
        TroupeError: The workers do not start, or a group cannot be sampled.
    """
    return asyncio.run(_resample(run, plan, address, console))


async def _resample(run: Path, plan: ResamplePlan, address: str | None, console: Console) -> Resampled:
    local, replay, timeout_s = fetch(plan.spec, console), plan.replay, plan.spec.schedule.train_timeout_s
    data = load_data(local.spec)
    request = RunRequest(plan.spec, run, resume=False, address=address)
    tables: list[pa.Table] = []
    async with open_run(request, local, console, frozenset({*TRAINERS, *SAMPLERS})) as context:
        settings = group_settings(plan.spec, data.train)
        sampling = _Sampling(plan.spec, context, context.cluster.put(data.train.table), settings)
        updates = _updates(plan.spec, context.workers, console)
        version = 0
        if replay.checkpoint is not None:
            await load_checkpoint(replay.checkpoint, updates.trainers, timeout_s)
            version = replay.checkpoint.step
        replayer = Replayer(updates, context.cluster.put, timeout_s)
        steps = {folder.kept.step: folder for folder in replay.folders}
        try:
            for wanted, groups in plan.groups.items():
                while version < wanted:
                    version += 1
                    repeated = await unless_stopped(context.stop, replayer.repeat(steps[version]))
                    console.message(repeated.line())
                tables += await unless_stopped(context.stop, sampling.sample(version, groups))
        finally:
            await sampling.pool.close()
        # The tables lie in the object store, which ends with the block.
        return compare_samples(plan, plan.folder.tables().batch, tables)


class _Sampling:
    """The engines of a run, which sample groups with the weights of the policy."""

    def __init__(
        self, spec: RolloutSpec, context: RunContext, prompts: TableRef, settings: RowTable[GroupSettings]
    ) -> None:
        policy = context.workers.policy
        if policy is None:
            raise TroupeError("the run has no policy workers")
        self._spec = spec
        self._context = context
        self._prompts = prompts
        self._settings = settings
        self.pool = EnginePool(context.workers.engines, context.launcher.engine, spec)
        self._sync = weight_sync(spec, policy, self.pool, context.cluster)

    async def sample(self, version: int, groups: Sequence[GroupOrigin]) -> list[pa.Table]:
        """Samples these groups at the same time, as the scheduler does; the engines start with version 0."""
        if version or self._spec.trains_adapters:
            await self._sync.push(version)
        self._context.console.message(f"sampling {len(groups)} group(s) with version {version}")
        return await asyncio.gather(*map(self._group, groups))

    async def _group(self, group: GroupOrigin) -> pa.Table:
        request = group_request(self._spec.seed, group.prompt_uid, group.row, self._settings[group.row])
        summary, table = await self.pool.sample(replace(request, samples=group.samples), self._prompts)
        if summary.refused:
            raise TroupeError(f"{group.prompt_uid} is refused now: {summary.refused}")
        return await self._context.cluster.get(table, self._spec.schedule.generate_timeout_s)


def _updates(spec: RunSpec, workers: Workers, console: Console) -> Updates:
    """The updates of a spec of either kind, on its trainers."""
    if workers.examples is not None:
        return OfflineUpdates(spec, workers.examples, console)
    if workers.policy is None:
        raise TroupeError("the run has no trainer: there is nothing to repeat")
    return RolloutUpdates(spec.rollouts, workers.policy, workers.critic, console)

"""Samples the groups of a step again: starts the trainers and the engines of a run, and neither rewards nor a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.hub.resolve import fetch
from troupe.orchestrator.launcher import RunContext
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.replay.plan import TRAINERS
from troupe.orchestrator.replay.repeat import Replayer
from troupe.orchestrator.replay.resample import Resampled, ResamplePlan, compare_samples
from troupe.orchestrator.replay_run import updates_of
from troupe.orchestrator.reporting.console import Console
from troupe.orchestrator.rollout_run import load_data, weight_sync
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.orchestrator.run import Classes, RunRequest, open_run
from troupe.orchestrator.run_pools import pool_bounds
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.batch import GroupOrigin, unless_stopped
from troupe.orchestrator.training.checkpoint import load_checkpoint
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.contract.roles import TableRef


def resample(run: Path, plan: ResamplePlan, address: str | None, classes: Classes, console: Console) -> Resampled:
    """Samples the groups of a step again, with the weights that sampled them.

    Args:
        run: Folder of the run.
        plan: What to sample.
        address: Ray cluster to join; None: a local one.
        classes: The worker classes.
        console: Shows the progress.

    Raises:
        TroupeError: The workers do not start, or a group cannot be sampled.
    """
    return asyncio.run(_resample(run, plan, address, classes, console))


async def _resample(
    run: Path, plan: ResamplePlan, address: str | None, classes: Classes, console: Console
) -> Resampled:
    local, replay, timeout_s = fetch(plan.spec, console), plan.replay, plan.spec.schedule.train_timeout_s
    data = load_data(local.spec)
    request = RunRequest(plan.spec, run, resume=False, address=address)
    tables: list[pa.Table] = []
    async with open_run(request, local, classes, console, frozenset({*TRAINERS, "rollout"})) as context:
        sampling = _Sampling(plan.spec, context, context.cluster.put(data.train.table))
        updates = updates_of(plan.spec, context.workers, console)
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
        uids = [group.prompt_uid for groups in plan.groups.values() for group in groups]
        samples, differences, gap = compare_samples(plan.folder.tables().batch, tables, uids)
        return Resampled(plan.folder.kept.step, samples, differences, plan.mixed, gap)


class _Sampling:
    """The engines of a run, which sample groups with the weights of the policy."""

    def __init__(self, spec: RolloutSpec, context: RunContext, prompts: TableRef) -> None:
        policy = context.workers.policy
        if policy is None:
            raise TroupeError("the run has no policy workers")
        self._spec = spec
        self._context = context
        self._prompts = prompts
        self.pool = EnginePool(context.workers.engines, context.launcher.engine, pool_bounds(spec))
        self._sync = weight_sync(spec, policy, self.pool, context.cluster)

    async def sample(self, version: int, groups: Sequence[GroupOrigin]) -> list[pa.Table]:
        """Samples these groups at the same time, as the scheduler does; the engines start with version 0."""
        if version:
            await self._sync.push(version)
        self._context.console.message(f"sampling {len(groups)} group(s) with version {version}")
        return await asyncio.gather(*map(self._group, groups))

    async def _group(self, group: GroupOrigin) -> pa.Table:
        seed = sampling_seed(self._spec.seed, group.prompt_uid)
        request = GroupRequest(group.prompt_uid, group.row, 0, group.samples, seed)
        engine = await self.pool.acquire(group.samples)
        try:
            summary, table = await self.pool.generate(request, self._prompts, engine)
        finally:
            await self.pool.release(engine, group.samples)
        if summary.refused:
            raise TroupeError(f"{group.prompt_uid} is refused now: {summary.refused}")
        return await self._context.cluster.get(table, self._spec.schedule.generate_timeout_s)

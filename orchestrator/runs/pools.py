"""The pools of an RL run, one for each role whose row names a function of this module, and how they are connected."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, cast

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import ReferenceGroup, WorkerHandle
from troupe.orchestrator.errors import TroupeError, WorkerError
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool, trainer_memory
from troupe.orchestrator.pools.linked import Callers, CallerT, LinkedPool, LinkT
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.roles.table import row_of, settings_of
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scoring import TokenScorer
from troupe.orchestrator.rollouts.weight_sync import WeightSync, weight_sync
from troupe.orchestrator.runs.session import Session
from troupe.orchestrator.spec.derived.digests import identity
from troupe.orchestrator.spec.derived.sizes import group_scoring_s
from troupe.orchestrator.spec.derived.training import (
    needs_old_logprobs,
    old_logprobs_at_batch,
    values_at_batch,
)
from troupe.orchestrator.spec.roles import environment_role
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.checkpoint import Checkpoint, load_checkpoint
from troupe.orchestrator.training.recovery import HoldMemory
from troupe.workers.contract import roles
from troupe.workers.contract.imports import resolve
from troupe.workers.contract.judges import JudgeLink

logger = logging.getLogger(__name__)

JudgeCaller = WorkerHandle[roles.Reward] | Engine
_CONNECT_TIMEOUT_S = 60.0
"""Timeout for giving an engine the link to the environment."""
_END_TIMEOUT_S = 10.0
"""Timeout for ending the episodes of a lost engine."""


class RunPools:
    """The pools of a run. Engines and reward workers are connected to the workers that they call."""

    def __init__(self, spec: RolloutSpec, session: Session) -> None:
        self.spec = spec
        self.session = session
        self.by_role: dict[str, ReplicaPool[Any]] = {
            role: resolve(path)(self, role)
            for role in spec.roles.present()
            if (path := row_of(spec, role).pool) is not None
        }
        """The pools that the run has."""
        self.sync: WeightSync | None = None
        """Transfers the policy's weights to the engines, or None without a policy."""
        self.trainer_memory: HoldMemory | None = None
        """Gives the trainers the memory of GPUs, or None if they share no GPU with an engine."""
        policy = session.workers.policy
        if policy is not None:
            self.sync = weight_sync(spec, policy, self.engines, session.cluster)
            if sleepers := spec.roles.sleepers():
                frozen = [self.by_role[role] for role in sleepers if role != "rollout"]
                limit = spec.schedule.sync_timeout_s
                self.trainer_memory = partial(trainer_memory, self.engines, frozen, policy, limit)

    @property
    def engines(self) -> EnginePool:
        return cast("EnginePool", self.by_role["rollout"])

    @property
    def rewards(self) -> RewardPool:
        return cast("RewardPool", self.by_role["reward"])

    @property
    def environments(self) -> list[LinkedPool[roles.EnvironmentServer, Engine, roles.EnvironmentLink]]:
        return [cast("Any", self.by_role[environment_role(name)]) for name in self.spec.roles.environments()]

    @property
    def behind_engines(self) -> list[LinkedPool[Any, Engine, Any]]:
        """The pools whose workers engines call: environments, judges that play, and engines of the reference."""
        found = [*self.environments, self.by_role.get("judge") if self.spec.roles.judge_plays else None]
        return [cast("Any", pool) for pool in (*found, self.by_role.get("reference_engine")) if pool is not None]

    @property
    def judges(self) -> LinkedPool[roles.JudgeEngine, JudgeCaller, JudgeLink] | None:
        return cast("Any", self.by_role.get("judge"))

    def require_sync(self) -> WeightSync:
        """The weight sync. Raises TroupeError without a policy."""
        if self.sync is None:
            raise TroupeError("the run has no policy workers")
        return self.sync

    def token_scorers(self) -> list[TokenScorer]:
        """The models that score tokens of every group during generation."""
        spec, workers = self.spec, self.session.workers
        policy, critic, teachers = workers.policy, workers.critic, spec.roles.teachers()
        timeout_s = spec.schedule.score_timeout_s
        scorers: list[TokenScorer] = []
        for role in ("reference", *teachers):
            group, sources = workers.group(role, ReferenceGroup), teachers[role].sources if role in teachers else None
            if group is not None:
                scorers.append(TokenScorer(group, group.score, timeout_s, self.by_role[role], sources))
        if critic is not None and not values_at_batch(spec):
            scorers.append(TokenScorer(critic, critic.compute_values, timeout_s))
        if policy is not None and spec.reference_in_policy:
            scorers.append(TokenScorer(policy, policy.reference_logprobs, timeout_s))
        if policy is not None and needs_old_logprobs(spec) and not old_logprobs_at_batch(spec):
            # The trainers are idle during synchronous generation, so they score group by group during it.
            scorers.append(TokenScorer(policy, policy.compute_logprobs, timeout_s))
        return scorers

    async def start(self) -> None:
        """Connects the engines and the reward workers to the workers that they call."""
        for pool in self.by_role.values():
            if isinstance(pool, LinkedPool):
                await pool.start()

    async def close(self) -> None:
        for pool in reversed(self.by_role.values()):
            await pool.close()


@asynccontextmanager
async def open_pools(spec: RolloutSpec, session: Session) -> AsyncIterator[RunPools]:
    """The pools of a run, connected; no worker is started after the block."""
    pools = RunPools(spec, session)
    try:
        await pools.start()
        yield pools
    finally:
        await pools.close()


async def load_trainers(found: Checkpoint, spec: RolloutSpec, pools: RunPools) -> None:
    workers, console = pools.session.workers, pools.session.console
    groups = [group for group in (workers.policy, workers.critic) if group is not None]
    async with nullcontext() if pools.trainer_memory is None else pools.trainer_memory():
        for line in await load_checkpoint(found, groups, spec.schedule.train_timeout_s):
            console.message(line)


def replica_pool(run: RunPools, role: str) -> ReplicaPool[Any]:
    """A pool of workers without links to other roles."""
    return ReplicaPool(run.session.workers.each(role), _launch(run, role), RestartBudget.of_role(run.spec, role))


def _launch(run: RunPools, role: str) -> Callable[[str], Awaitable[WorkerHandle[Any]]]:
    """Starts the worker of a name; an engine on the policy's GPU while trainers do not use its memory."""
    guest = role in run.spec.roles.guests()

    async def launch(name: str) -> WorkerHandle[Any]:
        async with run.engines.weights.memory.starting() if guest else nullcontext():
            return await run.session.launcher.replica(name)

    return launch


def engine_pool(run: RunPools, role: str) -> EnginePool:
    """The rollout engines, each connected to the workers that it calls."""

    async def start(name: str) -> Engine:
        engine = await run.session.launcher.engine(name)
        for pool in run.behind_engines:
            await pool.connect(engine)
        return engine

    async def end_episodes(engine: str) -> None:
        """Ends the episodes of a lost engine, as other engines' episodes need their processes."""

        async def end(worker: WorkerHandle[roles.EnvironmentServer]) -> None:
            try:
                await worker.call(roles.EnvironmentServer.end_all, _END_TIMEOUT_S, engine)
            except WorkerError as error:  # the worker's own pool notices what is wrong with it
                logger.warning("%s", error)

        await gather_all(end(worker) for environments in run.environments for worker in list(environments.workers))

    async def bring_up(engine: Engine) -> None:
        if run.sync is not None:
            await run.sync.bring_up(engine)

    async def renew() -> None:
        await run.session.launcher.calls.retry(run.require_sync().renew)

    weights = PoolWeights(bring_up, renew)
    return EnginePool(run.session.workers.each(role), start, run.spec, weights, on_loss=end_episodes)


def reward_pool(run: RunPools, role: str) -> RewardPool:
    """The reward workers, each connected to the judges."""

    async def start(name: str) -> WorkerHandle[roles.Reward]:
        worker: WorkerHandle[roles.Reward] = await run.session.launcher.replica(name)
        if run.judges is not None:
            await run.judges.connect(worker)
        return worker

    return RewardPool(
        run.session.workers.each(role),
        timeout_s=group_scoring_s(run.spec),
        launch=start,
        budget=RestartBudget.of_role(run.spec, role),
        judge_start_s=run.spec.schedule.start_timeout_s,
    )


def _linked(
    run: RunPools, role: str, callers: Callers[CallerT, LinkT], make_link: Callable[[Sequence[Any], str], LinkT]
) -> LinkedPool[Any, CallerT, LinkT]:
    """The pool of a role's workers, which `callers` call through a link."""
    launch, watch_s = _launch(run, role), run.spec.failures.health_interval_s
    workers, budget = run.session.workers.each(role), RestartBudget.of_role(run.spec, role)
    return LinkedPool(role, workers, callers, make_link, launch, budget, watch_s)


def environment_pool(run: RunPools, role: str) -> LinkedPool[roles.EnvironmentServer, Engine, roles.EnvironmentLink]:
    """The workers of one environment, which engines call through a link."""
    name = next(name for name in run.spec.roles.environments() if environment_role(name) == role)

    async def connect(engine: Engine, link: roles.EnvironmentLink) -> None:
        await engine.handle.call(roles.RolloutEngine.connect_environments, _CONNECT_TIMEOUT_S, name, link)

    return _linked(run, role, Callers(lambda: run.engines.workers, connect), run.session.cluster.environment_link)


def reference_engine_pool(run: RunPools, role: str) -> LinkedPool[roles.ReferenceSampler, Engine, roles.ReferenceLink]:
    """The engines of the reference, which rollout engines call through a link."""

    async def connect(engine: Engine, link: roles.ReferenceLink) -> None:
        await engine.handle.call(roles.RolloutEngine.connect_reference, _CONNECT_TIMEOUT_S, link)

    def make_link(workers: Sequence[WorkerHandle[roles.ReferenceSampler]], lost: str) -> roles.ReferenceLink:
        return run.session.cluster.reference_link(workers, run.spec.schedule.generate_timeout_s, lost)

    return _linked(run, role, Callers(lambda: run.engines.workers, connect), make_link)


def judge_pool(run: RunPools, role: str) -> LinkedPool[roles.JudgeEngine, JudgeCaller, JudgeLink]:
    """The judge workers, which reward workers, and engines that they play against, call through a link."""
    # What an answer depends on, also in a cache that outlives the run.
    name = identity(settings_of(run.spec, role).config, exclude={"engine", "device"})

    async def connect(worker: JudgeCaller, judge: JudgeLink) -> None:
        if isinstance(worker, Engine):
            await worker.handle.call(roles.RolloutEngine.connect_judge, _CONNECT_TIMEOUT_S, judge)
        else:  # a worker that scores a group answers when it has finished
            await worker.call(roles.Reward.connect_judge, run.spec.schedule.score_timeout_s, judge)

    def callers() -> list[JudgeCaller]:
        scoring = run.rewards.workers if "reward" in run.by_role else ()  # an audit has none
        return [*scoring, *(run.engines.workers if run.spec.roles.judge_plays else ())]

    def make_link(workers: Sequence[WorkerHandle[roles.JudgeEngine]], lost: str) -> JudgeLink:
        return run.session.cluster.judge_link(name, workers, lost)

    return _linked(run, role, Callers(callers, connect), make_link)

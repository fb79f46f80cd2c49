"""The pools of an RL run: engines, reward workers, reference, environments and judges, and how they are connected."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.pools.engines import Engine, EnginePool
from troupe.orchestrator.pools.linked import Callers, LinkedPool
from troupe.orchestrator.pools.replicas import ReplicaPool
from troupe.orchestrator.pools.restart_budget import RestartBudget
from troupe.orchestrator.rollouts.scoring import RewardPool, TokenScorer
from troupe.orchestrator.run_context import RunContext
from troupe.orchestrator.spec.rollout import RolloutSpec, environment_role
from troupe.workers.contract import roles
from troupe.workers.contract.judges import Judge

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 60.0
"""Timeout for giving an engine the link to the environment."""
_END_TIMEOUT_S = 10.0
"""Timeout for ending the episodes of a lost engine."""


class RunPools:
    """The pools of a run. Engines are connected to the environments, and reward workers to the judges."""

    def __init__(self, spec: RolloutSpec, context: RunContext) -> None:
        """Connects and watches nothing yet."""
        self._spec = spec
        self._context = context
        self._workers = context.workers
        self.engines = EnginePool(context.workers.engines, self._start_engine, spec)
        self.rewards = RewardPool(
            context.workers.reward,
            timeout_s=spec.schedule.score_timeout_s,
            launch=self._start_reward_worker,
            budget=self._budget("reward", spec.failures.reward_restarts),
            judge_start_s=spec.schedule.start_timeout_s,
        )
        self.environments = {environment_role(name): self._environment_pool(name) for name in spec.roles.environments()}
        """Those of each environment, by its role."""
        self.engines.on_loss = self._end_episodes
        self.judges = self._judge_pool()
        self.reference = self._reference_pool()

    def by_role(self) -> dict[str, ReplicaPool[Any]]:
        """The pools that the run has."""
        pools: dict[str, ReplicaPool[Any] | None] = {
            "rollout": self.engines,
            "reward": self.rewards,
            "reference": self.reference,
            **self.environments,
            "judge": self.judges,
        }
        return {role: pool for role, pool in pools.items() if pool is not None}

    def token_scorers(self) -> list[TokenScorer]:
        """The models that score tokens of every group during generation."""
        spec, workers = self._spec, self._workers
        reference, policy, critic = workers.reference, workers.policy, workers.critic
        timeout_s = spec.schedule.score_timeout_s
        scorers: list[TokenScorer] = []
        if reference is not None:
            scorers.append(TokenScorer(reference, reference.score, timeout_s, self.reference))
        if critic is not None:
            scorers.append(TokenScorer(critic, critic.compute_values, timeout_s))
        if policy is not None and spec.reference_in_policy:
            scorers.append(TokenScorer(policy, policy.reference_logprobs, timeout_s))
        if policy is not None and spec.needs_old_logprobs and not spec.old_logprobs_at_batch:
            # The policy is idle during synchronous generation, so it computes log-probs group by group meanwhile.
            scorers.append(TokenScorer(policy, policy.compute_logprobs, timeout_s))
        return scorers

    async def start(self) -> None:
        """Connects the engines to the environments and the reward workers to the judges, if the run has them."""
        for pool in (*self.environments.values(), self.judges):
            if pool is not None:
                await pool.start()

    async def close(self) -> None:
        """Starts no more workers."""
        for pool in reversed(self.by_role().values()):
            await pool.close()

    async def _start_engine(self, name: str) -> Engine:
        """Starts an engine, to replace one or to add one."""
        engine = await self._context.launcher.engine(name)
        for pool in self.environments.values():
            await pool.connect(engine)
        return engine

    async def _end_episodes(self, engine: str) -> None:
        """Ends the episodes of a lost engine, whose seats those of other engines need."""

        async def end(worker: WorkerHandle[roles.EnvironmentServer]) -> None:
            try:
                await worker.call(roles.EnvironmentServer.end_all, _END_TIMEOUT_S, engine)
            except WorkerError as error:  # the worker's own pool notices what is wrong with it
                logger.warning("%s", error)

        await gather_all(end(worker) for pool in self.environments.values() for worker in list(pool.workers))

    async def _start_reward_worker(self, name: str) -> WorkerHandle[roles.Reward]:
        """Starts a reward worker, to replace one or to add one."""
        worker: WorkerHandle[roles.Reward] = await self._context.launcher.replica(name)
        if self.judges is not None:
            await self.judges.connect(worker)
        return worker

    def _budget(self, role: str, restarts: int) -> RestartBudget:
        """The restarts of a role."""
        return RestartBudget(role, restarts, self._spec.failures.steps_per_restart)

    def _reference_pool(self) -> ReplicaPool[WorkerHandle[roles.Reference]] | None:
        group = self._workers.reference
        if group is None:
            return None
        budget = self._budget("reference", self._spec.failures.reference_restarts)
        return ReplicaPool(group.workers, self._context.launcher.replica, budget)

    def _environment_pool(self, name: str) -> LinkedPool[roles.EnvironmentServer, Engine, roles.EnvironmentLink]:
        """The pool of one environment, by its name."""
        failures, role = self._spec.failures, environment_role(name)

        async def connect(engine: Engine, link: roles.EnvironmentLink) -> None:
            await engine.connect_environments(name, link, _CONNECT_TIMEOUT_S)

        return LinkedPool(
            self._workers.environments(role),
            callers=Callers(lambda: self.engines.engines, connect),
            make_link=self._context.cluster.environment_link,
            launch=self._context.launcher.replica,
            budget=self._budget(role, failures.environment_restarts),
            watch_s=failures.health_interval_s,
        )

    def _judge_pool(self) -> LinkedPool[roles.JudgeEngine, WorkerHandle[roles.Reward], Judge] | None:
        failures, cluster, config = self._spec.failures, self._context.cluster, self._spec.judge_config()
        if config is None:
            return None
        name = config.model_dump_json(exclude={"engine", "device"})  # what an answer depends on

        async def connect(worker: WorkerHandle[roles.Reward], judge: Judge) -> None:
            # A worker that scores a group answers when it has finished.
            await worker.call(roles.Reward.connect_judge, self._spec.schedule.score_timeout_s, judge)

        def make_link(workers: Sequence[WorkerHandle[roles.JudgeEngine]], lost: str) -> Judge:
            return cluster.judge_link(name, workers, lost)

        return LinkedPool(
            self._workers.judges,
            callers=Callers(lambda: self.rewards.workers, connect),
            make_link=make_link,
            launch=self._context.launcher.replica,
            budget=self._budget("judge", failures.judge_restarts),
            watch_s=failures.health_interval_s,
        )

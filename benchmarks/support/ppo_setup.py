"""Workers and controller of a PPO run as `troupe run` creates them, with single stages run between the steps."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.support.harness import NotCorrect, Turn
from benchmarks.support.processes import Meter
from benchmarks.support.timing import Parts
from tests.fakes import with_fields
from troupe.orchestrator.cluster.worker_group import CriticGroup, PolicyGroup
from troupe.orchestrator.controller import Controller
from troupe.orchestrator.data.mixture import group_settings
from troupe.orchestrator.data.prompts import PromptSource
from troupe.orchestrator.hub.resolve import LocalFiles
from troupe.orchestrator.insight.bench.batches import Unscored
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler
from troupe.orchestrator.rollouts.scoring import ScoredGroup, TokenScorer, WaveScores
from troupe.orchestrator.rollouts.source import RolloutSource
from troupe.orchestrator.rollouts.weight_sync import WeightSync
from troupe.orchestrator.runs.checkpoints import folder_checkpoints
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.runs.rollouts import RolloutRun
from troupe.orchestrator.runs.session import RunRequest, open_session
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.metrics import PhaseTimers
from troupe.orchestrator.training.batch import Batch, BatchSource
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.updates import RolloutUpdates

_ALONE = 1
"""Added to the run's seed, so that the isolated stages draw prompts in another order than the steps."""
SIDE_BY_SIDE = ("policy update", "critic update")
SCORING = ("reward", "reference", "critic", "old log-probs")


def critical_path(stages: Mapping[str, float]) -> float:
    """Seconds of a step with a machine for every worker, without streaming between stages.

    The scorers run in parallel, and so do the two updates: the slowest of each counts.

    Args:
        stages: Seconds by stage.
    """
    alone = sum(seconds for name, seconds in stages.items() if name not in (*SCORING, *SIDE_BY_SIDE))
    return alone + max(stages[name] for name in SCORING) + max(stages[name] for name in SIDE_BY_SIDE)


class DeferredSource:
    """Wraps the run's batch source so that generation starts with the step that needs the batch, not before it."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source
        self._trained: int | None = None

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """Mark the previous batch as trained, which starts generation, and return the source's next batch."""
        self.flush_trained()
        return await self.source.next_batch(version, timers)

    def mark_trained(self, version: int) -> None:
        """Keep the version for `flush_trained`: passing it on would start the next step's generation."""
        self._trained = version

    def flush_trained(self) -> None:
        """Pass a kept version on to the source."""
        if self._trained is not None:
            self.source.mark_trained(self._trained)
            self._trained = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


@dataclass
class PPOSetup:
    """Runs whole steps of the product, and its stages in isolation, on the same workers."""

    controller: Controller
    source: DeferredSource
    sync: WeightSync
    alone: RolloutScheduler
    """Generation without scoring, on other prompts."""
    ledger: Ledger
    """The ledger of `alone`."""
    run: RolloutRun
    policy: PolicyGroup
    critic: CriticGroup
    scorers: dict[str, TokenScorer]
    tokens: int
    """Response tokens per step."""
    gaps: list[float] = field(default_factory=list)
    """Sampler-to-trainer gap of each policy update of the isolated stages, in nats per token."""

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: RolloutSpec, out: Path) -> AsyncIterator[PPOSetup]:
        """Start everything that `troupe run` starts, and end it on exit."""
        out.mkdir()
        console = Console(io.StringIO())
        request = RunRequest(spec, out, False, None)
        async with open_session(request, console, local=LocalFiles(spec), reads=True) as opened:
            context = replace(opened, checkpoints=folder_checkpoints(spec, out))
            pools, data = RunPools(spec, context), context.data
            run = RolloutRun(context, pools)
            try:
                controller = await run.controller()
                components, workers = controller.components, context.workers
                timeout_s = spec.schedule.score_timeout_s
                policy, critic, reference = workers.policy, workers.critic, workers.reference
                if components.sync is None or policy is None or critic is None or reference is None:
                    raise NotCorrect("a PPO run needs a policy, a critic, a reference and a weight sync")
                if not isinstance(components.source, RolloutSource):
                    raise NotCorrect("a PPO run needs a rollout source")
                source, ledger = DeferredSource(components.source), Ledger()
                controller.components = replace(components, source=cast("BatchSource", source))
                prompts = PromptSource(data.train, spec.seed + _ALONE)
                alone = run._scheduler(ledger, prompts, None, 0, group_settings(spec, data.train))
                alone._scorer = Unscored()
                yield cls(
                    controller=controller,
                    source=source,
                    sync=components.sync,
                    alone=alone,
                    ledger=ledger,
                    run=run,
                    policy=policy,
                    critic=critic,
                    scorers={
                        "reference": TokenScorer(reference, reference.score, timeout_s),
                        "critic": TokenScorer(critic, critic.compute_values, timeout_s),
                        "old log-probs": TokenScorer(policy, policy.compute_logprobs, timeout_s),
                    },
                    tokens=spec.schedule.prompts_per_step * spec.group_size * spec.sampling.max_tokens,
                )
            finally:
                await pools.close()

    async def step(self, turn: int) -> Turn:
        """Run one step of the product."""
        if turn == 0:
            self.source.source.start()
        meter = Meter()
        self.controller._timers = PhaseTimers()
        await self.controller.step(turn)
        found = meter.turn(self.tokens)
        await self.source.source.flush()
        return found

    async def stages(self, turn: int) -> Turn:
        """Run every stage of a step, one after the other."""
        meter, parts = Meter(), Parts()
        with parts.timed("generate"):
            if turn == 0:
                self.alone.start()
            else:
                self.alone.advance(turn)
                self.alone.serve(turn)
            groups = await self.alone.next_batch()
        sampled = sum(sample.response_tokens for group in groups for sample in group.summary.samples)
        if sampled != self.tokens:
            raise NotCorrect(f"the isolated generation sampled {sampled} tokens, expected {self.tokens}")
        groups = await self._scored(groups, parts)
        remembered = self.source.source._advantage_state
        with parts.timed("prepare"):
            batch = await self.source.source._prepare(self.controller.version, groups)
        self.source.source._advantage_state = remembered
        await self._updates(turn, batch, parts)
        with parts.timed("sync"):
            await self.sync.push(self.controller.version)
        cpu_s, foreign = meter.read()
        for group in groups:
            for sample in group.summary.samples:
                self.ledger.mark_trained(group.summary.prompt_uid, sample.sample_index)
        phases = parts.read()
        figures = {"critical path, s": critical_path(phases)}
        return Turn(sum(phases.values()), sampled, cpu_s, foreign, phases, figures)

    async def finish(self) -> None:
        """Close both schedulers and check both ledgers. Raises NotCorrect where a sample was not trained."""
        self.source.flush_trained()
        await self.source.source.close()
        await self.alone.close()
        self.controller.sinks.close()
        for ledger in (self.controller.components.ledger, self.ledger):
            ledger.check()
            if (counts := ledger.counts())["trained"] != counts["dispatched"]:
                raise NotCorrect(f"not every sample was trained: {counts}")

    async def _scored(self, groups: Sequence[ScoredGroup], parts: Parts) -> list[ScoredGroup]:
        """Score the groups by reward, reference, critic and policy, one after the other."""
        with parts.timed("reward"):
            rewards = await asyncio.gather(*(self.run._rewards.score(group.rollouts) for group in groups))
        scores: list[list[Any]] = [[] for _ in groups]
        for name, scorer in self.scorers.items():
            with parts.timed(name):
                scored = await asyncio.gather(*(_score(scorer, group) for group in groups))
            for own, tables in zip(scores, scored, strict=True):
                own += tables.tables
        return [
            replace(group, rewards=summary, reward_table=table, token_scores=tuple(own))
            for group, (summary, table), own in zip(groups, rewards, scores, strict=True)
        ]

    async def _updates(self, turn: int, batch: Batch, parts: Parts) -> None:
        """Run the policy's updates on the batch, then the critic's, through the controller."""
        spec, console = self.run._spec, self.controller.console
        policy = RolloutUpdates(spec, self.policy, None, console)
        warmup = dict(spec.roles.critic or {}) | {"warmup_steps": turn + 1}
        critic = RolloutUpdates(with_fields(spec, roles={"critic": warmup}), self.policy, self.critic, console)
        for name, one in (("policy update", policy), ("critic update", critic)):
            with parts.timed(name):
                updates, _ = await one.run(turn, batch, self.controller.parts.penalty.state)
            self.gaps += [update["policy/rollout_logprob_gap"] for update in updates if name == "policy update"]


def _score(scorer: TokenScorer, group: ScoredGroup) -> Awaitable[WaveScores]:
    return scorer.score([s.prompt_tokens + s.response_tokens for s in group.summary.samples], group.rollouts)

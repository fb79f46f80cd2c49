"""The product's cast and controller as `troupe run` makes them, with pauses between steps in which stages run alone."""

from __future__ import annotations

import asyncio
import copy
import io
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from typing import cast as static_cast

from benchmarks.harness import NotCorrect, Turn
from benchmarks.ppo_step import critical_path
from benchmarks.processes import Meter
from benchmarks.streaming import CLASSES, Unscored
from benchmarks.timing import Parts
from orchestrator.batch_source import Batch, BatchSource
from orchestrator.checkpoint import CheckpointStore
from orchestrator.console import Console
from orchestrator.controller import Controller
from orchestrator.ledger import Ledger
from orchestrator.metrics import PhaseTimers
from orchestrator.prompts import PromptSource
from orchestrator.rollout_source import RolloutSource
from orchestrator.run import Company, RunRequest, load_data, open_scene
from orchestrator.scheduler import RolloutScheduler
from orchestrator.scoring import ScoredGroup, TokenScorer
from orchestrator.spec import Spec
from orchestrator.weight_sync import WeightSync

_ALONE = 1
"""Added to the run's seed: the stages alone draw the prompts in another order than the steps."""


class Waiting:
    """The run's own source of batches, which begins to generate only when the step that needs the batch begins."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source
        self._trained: int | None = None

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """As the source's, from the first token on."""
        self.enter_books()
        return await self.source.next_batch(version, timers)

    def trained(self, version: int) -> None:
        """Remember it: entering it would start the next step's generation."""
        self._trained = version

    def enter_books(self) -> None:
        """Hand on what was remembered."""
        if self._trained is not None:
            self.source.trained(self._trained)
            self._trained = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


@dataclass
class PPOStage:
    """Steps of the product, and its stages alone, on the same workers."""

    controller: Controller
    source: Waiting
    sync: WeightSync
    alone: RolloutScheduler
    """Generation without scoring, on other prompts."""
    ledger: Ledger
    """Of `alone`."""
    company: Company
    scorers: dict[str, TokenScorer]
    tokens: int
    """Response tokens of a step."""
    gaps: list[float] = field(default_factory=list)
    """Sampler to trainer in the updates of the stages alone, in nats a token."""

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: Spec, out: Path) -> AsyncIterator[PPOStage]:
        """Everything `troupe run` starts, ended afterwards."""
        out.mkdir()
        store = CheckpointStore(out / "checkpoints", spec.checkpoint.keep)
        store.prepare()
        data = load_data(spec)
        console = Console(io.StringIO())
        async with open_scene(RunRequest(spec, out, False, None), lambda: CLASSES, console) as scene:
            company = Company(spec, out, scene, data)
            try:
                controller = await company.controller(store, None)
                cast, stage, bound = controller.cast, scene.stage, spec.schedule.score_timeout_s
                if cast.sync is None or stage.reference is None or stage.critic is None:
                    raise NotCorrect("a PPO run has a reference, a critic and weights to hand over")
                if not isinstance(cast.source, RolloutSource):
                    raise NotCorrect("a PPO run learns from rollouts")
                waiting, ledger = Waiting(cast.source), Ledger()
                controller.cast = replace(cast, source=static_cast("BatchSource", waiting))
                prompts = PromptSource(data.train, spec.seed + _ALONE)
                alone = company._scheduler(ledger, prompts, 0)
                alone._scorer = Unscored()
                yield cls(
                    controller=controller,
                    source=waiting,
                    sync=cast.sync,
                    alone=alone,
                    ledger=ledger,
                    company=company,
                    scorers={
                        "reference": TokenScorer(stage.reference, "score", bound),
                        "critic": TokenScorer(stage.critic, "compute_values", bound),
                        "old log-probs": TokenScorer(cast.policy, "compute_logprobs", bound),
                    },
                    tokens=spec.schedule.prompts_per_step * spec.group_size * spec.sampling.max_tokens,
                )
            finally:
                await company.close()

    async def step(self, turn: int) -> Turn:
        """One step of the product."""
        if turn == 0:
            self.source.source.start()
        meter, began = Meter([os.getpid()]), time.monotonic()
        self.controller._timers = PhaseTimers()
        await self.controller.step(turn)
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()
        await self.source.source.flush()
        return Turn(wall_s, self.tokens, cpu_s, foreign)

    async def stages(self, turn: int) -> Turn:
        """Every stage of a step, one after the other."""
        meter, parts = Meter([os.getpid()]), Parts()
        with parts.noted("generate"):
            if turn == 0:
                self.alone.start()
            else:
                self.alone.advance(turn)
            groups = await self.alone.next_batch()
        sampled = sum(sample.response_tokens for group in groups for sample in group.summary.samples)
        if sampled != self.tokens:
            raise NotCorrect(f"{sampled} tokens were sampled alone, not {self.tokens}")
        groups = await self._scored(groups, parts)
        remembered = self.source.source._memory
        with parts.noted("prepare"):
            batch = await self.source.source._prepare(self.controller.version, groups)
        self.source.source._memory = remembered
        await self._updates(turn, batch, parts)
        with parts.noted("sync"):
            await self.sync.push(self.controller.version)
        cpu_s, foreign = meter.read()
        for group in groups:
            for sample in group.summary.samples:
                self.ledger.trained(group.summary.prompt_uid, sample.sample_index)
        phases = parts.read()
        figures = {"critical path, s": critical_path(phases)}
        return Turn(sum(phases.values()), sampled, cpu_s, foreign, phases, figures)

    async def finish(self) -> None:
        """Close both books. Raises NotCorrect where a sample was not trained."""
        self.source.enter_books()
        await self.source.source.close()
        await self.alone.close()
        self.controller.sinks.close()
        for ledger in (self.controller.cast.ledger, self.ledger):
            ledger.check()
            if (books := ledger.counts())["trained"] != books["dispatched"]:
                raise NotCorrect(f"not every sample was trained: {books}")

    async def _scored(self, groups: Sequence[ScoredGroup], parts: Parts) -> list[ScoredGroup]:
        """The groups with what reward, reference, critic and policy say of them, one kind after the other."""
        with parts.noted("reward"):
            rewards = await asyncio.gather(*(self.company._rewards.score(group.rollouts) for group in groups))
        scores: list[list[Any]] = [[] for _ in groups]
        for name, scorer in self.scorers.items():
            with parts.noted(name):
                scored = await asyncio.gather(*(_score(scorer, group) for group in groups))
            for own, tables in zip(scores, scored, strict=True):
                own += tables
        return [
            replace(group, rewards=summary, reward_table=table, token_scores=tuple(own))
            for group, (summary, table), own in zip(groups, rewards, scores, strict=True)
        ]

    async def _updates(self, turn: int, batch: Batch, parts: Parts) -> None:
        """The policy's updates on the batch, then the critic's, each as the controller has them made."""
        plan, cast = self.controller.plan, self.controller.cast
        policy, critic = copy.copy(self.controller), copy.copy(self.controller)
        policy.cast = replace(cast, critic=None)
        critic.plan = replace(plan, critic_warmup=turn + 1)
        for name, one in (("policy update", policy), ("critic update", critic)):
            with parts.noted(name):
                updates = await one._update(turn, batch)
            self.gaps += [update["policy/rollout_logprob_gap"] for update in updates if name == "policy update"]


def _score(scorer: TokenScorer, group: ScoredGroup) -> Awaitable[tuple[Any, ...]]:
    return scorer.score([s.prompt_tokens + s.response_tokens for s in group.summary.samples], group.rollouts)

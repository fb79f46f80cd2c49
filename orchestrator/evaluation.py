"""Held-out evaluation through the same engines and reward workers as training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from orchestrator.engine_pool import EnginePool
from orchestrator.errors import DataLost, WorkerError
from orchestrator.handles import TableRef
from orchestrator.metrics import pass_at_k
from orchestrator.prompts import PromptPick
from orchestrator.scheduler import sampling_seed
from orchestrator.scoring import RewardPool
from workers.config import EvalSampling
from workers.messages import GroupRequest, GroupSummary, RewardSummary

_ATTEMPTS = 3


@dataclass(frozen=True)
class EvalPlan:
    """What is evaluated and how."""

    picks: tuple[PromptPick, ...]
    sampling: EvalSampling
    success_at: float
    """A sample with at least this reward counts as solved."""
    seed: int


class Evaluator:
    """Runs the held-out prompts and averages; failed samples are counted, never scored 0."""

    def __init__(self, plan: EvalPlan, pool: EnginePool, rewards: RewardPool, prompts: TableRef) -> None:
        self._plan = plan
        self._pool = pool
        self._rewards = rewards
        self._prompts = prompts

    async def run(self, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Metrics: reward, accuracy (share of solved samples), pass@k, length, counts of refused and failed."""
        done = 0

        async def one(pick: PromptPick) -> tuple[RewardSummary, list[int]] | None:
            nonlocal done
            result = await self._one(pick)
            done += 1
            if progress is not None:
                progress(done, len(self._plan.picks))
            return result

        results = await asyncio.gather(*(one(pick) for pick in self._plan.picks))
        return self._metrics([result for result in results if result is not None])

    async def _one(self, pick: PromptPick) -> tuple[RewardSummary, list[int]] | None:
        sampling = self._plan.sampling
        request = GroupRequest(
            prompt_uid=pick.prompt_uid,
            row=pick.row,
            attempt=0,
            samples=sampling.samples,
            seed=sampling_seed(self._plan.seed, pick.prompt_uid),
            greedy=sampling.temperature == 0.0,
            top_p=sampling.top_p,
            temperature=sampling.temperature,
        )
        tries = 0
        while True:
            summary, rollouts = await self._generate(request)
            if summary.refused:
                return None
            try:
                rewards, _ = await self._rewards.score(rollouts)
            except DataLost:
                tries += 1
                if tries >= _ATTEMPTS:
                    raise
            else:
                return rewards, [sample.response_tokens for sample in summary.samples]

    async def _generate(self, request: GroupRequest) -> tuple[GroupSummary, TableRef]:
        """Generate, again on another engine where one fails; raises the last WorkerError."""
        tries = 0
        while True:
            engine = await self._pool.acquire(request.samples)
            try:
                return await self._pool.generate(request, self._prompts, engine)
            except WorkerError as error:
                await self._pool.report_failure(engine, error)
                tries += 1
                if tries >= _ATTEMPTS:
                    raise
            finally:
                await self._pool.release(engine, request.samples)

    def _metrics(self, results: list[tuple[RewardSummary, list[int]]]) -> dict[str, float]:
        scored = [[r for r in rewards.rewards if r is not None] for rewards, _ in results]
        flat = [reward for group in scored for reward in group]
        lengths = [length for _, group in results for length in group]
        metrics = {
            "eval/prompts": float(len(results)),
            "eval/refused": float(len(self._plan.picks) - len(results)),
            "eval/failed_samples": float(sum(len(r.rewards) for r, _ in results) - len(flat)),
        }
        if not flat:
            return metrics
        solved = [[reward >= self._plan.success_at for reward in group] for group in scored if group]
        metrics |= {
            "eval/reward": fmean(flat),
            "eval/accuracy": fmean(s for group in solved for s in group),
            "eval/response_tokens": fmean(lengths),
        }
        k = 2
        while k <= self._plan.sampling.samples:
            wide = [group for group in solved if len(group) >= k]
            if wide:
                metrics[f"eval/pass@{k}"] = fmean(pass_at_k(len(group), sum(group), k) for group in wide)
            k *= 2
        return metrics

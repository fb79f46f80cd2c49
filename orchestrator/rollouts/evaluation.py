"""Held-out evaluation through the same engines and reward workers as training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.errors import DataLost, WorkerError
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.reporting.metrics import pass_at_k
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.orchestrator.rollouts.scoring import RewardPool
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import EvaluationConfig
from troupe.workers.contract.messages import GroupRequest, GroupSummary, RewardSummary
from troupe.workers.contract.roles import TableRef

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
SAVED_SAMPLES = 4096
"""Most samples of an evaluation that are written: those of the first prompts, the same ones in every evaluation."""


@dataclass(frozen=True)
class _Sampled:
    """The samples of one prompt."""

    rewards: RewardSummary
    lengths: list[int]
    """Response tokens of each sample."""
    tables: tuple[TableRef, ...]
    """ROLLOUTS and REWARDS, where they will be written."""


class Evaluator:
    """Samples and scores the held-out prompts; failed samples are counted separately, never scored 0."""

    def __init__(
        self,
        spec: RolloutSpec,
        picks: Sequence[PromptPick],
        prompts: TableRef,
        pool: EnginePool,
        rewards: RewardPool,
        responses: Path | None = None,
    ) -> None:
        """Evaluates nothing yet.

        Args:
            spec: Says how the prompts are sampled, and from which reward a sample counts as solved.
            picks: The held-out prompts.
            prompts: The table that they are rows of.
            pool: The engines.
            rewards: The reward workers.
            responses: Folder for the samples of every evaluation; None: they are not written.
        """
        self._seed = spec.seed
        self._sampling = (spec.evaluation or EvaluationConfig()).sampling
        self._solved_at = spec.solved_at
        self._picks = tuple(picks)
        self._responses = responses
        self._pool = pool
        self._rewards = rewards
        self._prompts = prompts

    async def run(self, step: int, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Evaluates all prompts with the weights that the engines serve.

        Args:
            step: Steps that these weights were trained for; names the file of the samples.
            progress: Called with (finished prompts, all prompts).

        Returns:
            `eval/...`: mean reward, mean response length in tokens, and counts of prompts, refused prompts and failed
            samples; where the reward says which samples are solved, also `solved_metrics`.

        Raises:
            WorkerError: A prompt failed on several engines, or its reward worker failed.
            EnginesLost: No engine is left and none is starting.
        """
        done = 0
        saved = max(1, SAVED_SAMPLES // self._sampling.samples) if self._responses is not None else 0

        async def one(number: int, pick: PromptPick) -> _Sampled | None:
            nonlocal done
            result = await self._one(pick, save=number < saved)
            done += 1
            if progress is not None:
                progress(done, len(self._picks))
            return result

        results = await asyncio.gather(*(one(number, pick) for number, pick in enumerate(self._picks)))
        sampled = [result for result in results if result is not None]
        await self._save(step, sampled)
        return self._metrics(sampled)

    async def _save(self, step: int, results: list[_Sampled]) -> None:
        """Has a reward worker write the samples. The metrics are valid without them, so an error is only logged."""
        folder, tables = self._responses, [table for result in results for table in result.tables]
        if folder is None or not tables:
            return
        try:
            await self._rewards.write_evaluation(str(folder / f"step-{step:06d}.parquet"), step, tables)
        except WorkerError as error:
            logger.error("the samples of an evaluation were not written: %s", error)

    async def _one(self, pick: PromptPick, save: bool) -> _Sampled | None:
        """The samples of one prompt; None if the engine refuses it. Lost samples are sampled again."""
        sampling = self._sampling
        request = GroupRequest(
            prompt_uid=pick.prompt_uid,
            row=pick.row,
            attempt=0,
            samples=sampling.samples,
            seed=sampling_seed(self._seed, pick.prompt_uid),
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
                rewards, judged = await self._rewards.score(rollouts)
            except DataLost:
                tries += 1
                if tries >= _ATTEMPTS:
                    raise
            else:
                lengths = [sample.sampled_tokens for sample in summary.samples]
                return _Sampled(rewards, lengths, (rollouts, judged) if save else ())

    async def _generate(self, request: GroupRequest) -> tuple[GroupSummary, TableRef]:
        """Generates on up to `_ATTEMPTS` engines; raises the WorkerError of the last."""
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

    def _metrics(self, results: list[_Sampled]) -> dict[str, float]:
        """Metrics of the prompts that were not refused."""
        scored = [[reward for reward in result.rewards.rewards if reward is not None] for result in results]
        flat = [reward for group in scored for reward in group]
        metrics = {
            "eval/prompts": float(len(results)),
            "eval/refused": float(len(self._picks) - len(results)),
            "eval/failed_samples": float(sum(len(result.rewards.rewards) for result in results) - len(flat)),
        }
        if not flat:
            return metrics
        metrics["eval/reward"] = fmean(flat)
        if self._solved_at is not None:
            metrics |= solved_metrics([group for group in scored if group], self._solved_at)
        metrics["eval/response_tokens"] = fmean(length for result in results for length in result.lengths)
        return metrics


def solved_metrics(groups: list[list[float]], solved_at: float) -> dict[str, float]:
    """How many samples are solved.

    Args:
        groups: Rewards of the samples of each prompt, at least one.
        solved_at: A sample with at least this reward is solved.

    Returns:
        `eval/accuracy`, the share of solved samples; `eval/pass@k` for every power of two k up to the largest group,
        over the prompts with at least k samples; `eval/solved_at`.
    """
    solved = [[reward >= solved_at for reward in group] for group in groups]
    metrics = {"eval/accuracy": fmean(s for group in solved for s in group), "eval/solved_at": solved_at}
    k = 2
    while wide := [group for group in solved if len(group) >= k]:
        metrics[f"eval/pass@{k}"] = fmean(pass_at_k(len(group), sum(group), k) for group in wide)
        k *= 2
    return metrics

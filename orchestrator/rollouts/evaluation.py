"""Held-out evaluation through the same engines and reward workers as training, between its steps or beside them."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import PromptPick, evaluation_picks
from troupe.orchestrator.errors import DataLost, EvaluationLost, WorkerError
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool, sample_group
from troupe.orchestrator.rollouts.evaluation_log import EvaluationLog
from troupe.orchestrator.rollouts.held_out import PromptResult, SetResult, comparisons, summarize
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.orchestrator.spec.derived.sampling import HeldOutSettings, held_out_sets
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import GroupRequest, GroupSummary, sampled_tokens
from troupe.workers.contract.roles import TableRef
from troupe.workers.contract.text import one_line

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Calls for a prompt before its failure ends an evaluation."""
SAVED_SAMPLES = 4096
"""Most samples of each set that an evaluation writes: the first prompts', the same ones in every evaluation."""
MOST_LEVELS = 32
"""Most levels of a set that are reported: a key with more values is no level."""
LONGEST_LEVEL = 64
"""Characters of a level: a key with a longer value is no level."""


Sampler = Callable[[GroupRequest, TableRef], Awaitable[tuple[GroupSummary, TableRef]]]
"""Samples a group of a row of a PROMPTS table; raises WorkerError."""


def engine_sampler(pool: EnginePool) -> Sampler:
    """Samples on the engines of a run: each group on up to `ATTEMPTS` of them."""
    return partial(sample_group, pool, attempts=ATTEMPTS)


def held_sampler(pool: EnginePool, engine: Engine, version: int) -> Sampler:
    """Samples on an engine that is held at a version, as many prompts at a time as it has room for. Raises
    EvaluationLost if the engine is lost or leaves, or tokens are of another version; the WorkerError of the last
    attempt if it fails otherwise."""
    turn = asyncio.Lock()

    async def sample(request: GroupRequest, prompts: TableRef) -> tuple[GroupSummary, TableRef]:
        for attempt in itertools.count(1):
            async with turn:
                reserved = await pool.reserve(engine, request.samples)
            if not reserved:
                break
            try:
                summary, rollouts = await pool.generate(request, prompts, engine)
            except WorkerError as error:
                await pool.report_failure(engine, error)
                if engine in pool.workers and attempt >= ATTEMPTS:
                    raise
                continue
            finally:
                pool.release(engine, request.samples)
            if any({one.oldest_version, one.newest_version} != {version} for one in summary.samples):
                raise EvaluationLost(f"{engine.name} has received other weights")
            return summary, rollouts
        raise EvaluationLost(f"{engine.name} is lost, or leaves")

    return sample


@dataclass(frozen=True)
class HeldOutSet:
    """The prompts of one source of `data.eval`."""

    settings: HeldOutSettings
    picks: Sequence[PromptPick]
    """The picks to evaluate."""
    prompts: TableRef
    """The table that they are rows of."""
    levels: Sequence[str] = ()
    """Level of each row of the table, "" without one; no entries if no row has a level."""


@dataclass(frozen=True)
class _Sampled:
    """The samples of one prompt."""

    result: PromptResult
    tables: tuple[TableRef, ...]
    """ROLLOUTS and REWARDS if they will be written."""


def levels_of(pool: Pool, key: str) -> list[str]:
    """Level of each row of a pool, by a key of its metadata; none if no row has it, or it has too many or too long
    values. A level is part of the names of metrics, so that it is one line without control characters."""
    values = [json.loads(text).get(key) for text in pool.table["metadata"].to_pylist()]
    levels = ["" if value is None else one_line(str(value)) for value in values]
    distinct = {level for level in levels if level}
    longest = max(map(len, distinct), default=0)
    return levels if 0 < len(distinct) <= MOST_LEVELS and longest <= LONGEST_LEVEL else []


def sets_of(
    spec: RolloutSpec, pools: Mapping[str, Pool], put: Callable[[pa.Table], TableRef], say: Callable[[str], object]
) -> list[HeldOutSet]:
    """The held-out sets of a spec. `say`: receives a line for each set whose accuracy is not reported."""
    sets: list[HeldOutSet] = []
    prompts = spec.evaluation.prompts if spec.evaluation is not None else 0
    for settings in held_out_sets(spec):
        if settings.solved_at is None:
            of = f" of {settings.name}" if settings.name else ""
            where = f"data.{settings.section}" if settings.name else "evaluation"
            hint = f"set {where}.solved_at to the reward of a right response"
            say(f"held-out accuracy{of} is not reported for this reward: {hint}")
        pool = pools[settings.section]
        picks = evaluation_picks(pool, spec.seed, prompts, settings.name)
        sets.append(HeldOutSet(settings, picks, put(pool.table), levels_of(pool, settings.level)))
    return sets


class Evaluator:
    """Samples and scores the held-out prompts; failed samples are counted separately, never scored 0."""

    def __init__(
        self,
        seed: int,
        sets: Sequence[HeldOutSet],
        sample: Sampler,
        rewards: RewardPool,
        responses: Path | None = None,
        log: EvaluationLog | None = None,
    ) -> None:
        """Evaluates nothing yet. `responses`: folder for the samples of every evaluation, or None to write none."""
        self._seed = seed
        self._sets = tuple(sets)
        self._responses = responses
        self._sample = sample
        self._rewards = rewards
        self._log = log

    async def run(
        self, step: int, progress: Callable[[int, int], None] | None = None, sample: Sampler | None = None
    ) -> dict[str, float]:
        """Evaluates all prompts with the weights that the engines serve. Returns `SetResult.metrics` of every set,
        under `eval/`, or `eval/NAME/` of a set with a name. Raises WorkerError if a prompt failed on several engines,
        or its reward worker failed; EnginesLost if no engine is left and none is starting. `step`: steps that these
        weights were trained for; names the file of the samples."""
        results = await self.results(step, progress, sample)
        if self._log is not None:
            try:
                self._log.add(step, results)
            except OSError as error:
                logger.error("the results of an evaluation were not written: %s", error)
        return metrics_of(results, [one.settings for one in self._sets])

    async def results(
        self, step: int, progress: Callable[[int, int], None] | None = None, sample: Sampler | None = None
    ) -> dict[str, SetResult]:
        """Evaluates like `run`; returns the result of every set by its label."""
        done, total = 0, sum(len(one.picks) for one in self._sets)

        async def prompt(held_out: HeldOutSet, number: int, pick: PromptPick) -> _Sampled | None:
            nonlocal done
            samples = held_out.settings.sampling.samples
            saved = self._responses is not None and number < max(1, SAVED_SAMPLES // samples)
            result = await self._one(held_out, pick, sample or self._sample, save=saved)
            done += 1
            if progress is not None:
                progress(done, total)
            return result

        async def all_of(held_out: HeldOutSet) -> list[_Sampled | None]:
            return await gather_all(prompt(held_out, number, pick) for number, pick in enumerate(held_out.picks))

        sampled = await gather_all(all_of(held_out) for held_out in self._sets)
        await self._save(step, [result for results in sampled for result in results if result is not None])
        return {
            held_out.settings.label: await asyncio.to_thread(_summarized, held_out, results)
            for held_out, results in zip(self._sets, sampled, strict=True)
        }

    async def _save(self, step: int, results: list[_Sampled]) -> None:
        """Makes a reward worker write the samples. The metrics are valid without them, so an error is only logged."""
        folder, tables = self._responses, [table for result in results for table in result.tables]
        if folder is None or not tables:
            return
        try:
            await self._rewards.write_evaluation(str(folder / f"step-{step:06d}.parquet"), step, tables)
        except WorkerError as error:
            logger.error("the samples of an evaluation were not written: %s", error)

    async def _one(self, held_out: HeldOutSet, pick: PromptPick, sample: Sampler, save: bool) -> _Sampled | None:
        """The samples of one prompt; None if the engine refuses it. Lost samples are sampled again."""
        sampling = held_out.settings.sampling
        request = GroupRequest(
            prompt_uid=pick.prompt_uid,
            row=pick.row,
            attempt=0,
            samples=sampling.samples * max(1, len(held_out.settings.players)),
            seed=sampling_seed(self._seed, pick.prompt_uid),
            greedy=sampling.temperature == 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=sampling.stop,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            environment=held_out.settings.environment,
        )
        tries = 0
        while True:
            summary, rollouts = await sample(request, held_out.prompts)
            if summary.refused:
                return None
            try:
                rewards, judged = await self._rewards.score(
                    rollouts, held_out.settings.rewards, vote=held_out.settings.votes
                )
            except DataLost:
                tries += 1
                if tries >= ATTEMPTS:
                    raise
            else:
                result = PromptResult(
                    rewards=rewards.rewards,
                    lengths=tuple(sampled_tokens(summary.samples)),
                    truncated=sum(sample.finish_reason == "length" for sample in summary.samples),
                    answers=rewards.answers,
                    level=held_out.levels[pick.row] if held_out.levels else "",
                    comparisons=comparisons(rewards.components, held_out.settings.compared),
                )
                return _Sampled(result, (rollouts, judged) if save else ())


def metrics_of(results: Mapping[str, SetResult], sets: Sequence[HeldOutSettings]) -> dict[str, float]:
    return {name: value for one in sets for name, value in results[one.label].metrics(one.prefix).items()}


def _summarized(held_out: HeldOutSet, sampled: Sequence[_Sampled | None]) -> SetResult:
    settings = held_out.settings
    results = [one.result for one in sampled if one is not None]
    return summarize(
        results,
        refused=len(sampled) - len(results),
        samples=settings.sampling.samples,
        solved_at=settings.solved_at,
        average=settings.average,
        pass_at=settings.pass_at,
        players=settings.players,
    )


class EvaluationBeside:
    """Evaluates the weights that the engines serve, while training continues on all engines but one."""

    def __init__(self, evaluator: Evaluator, pool: EnginePool) -> None:
        self._evaluator = evaluator
        self._pool = pool

    async def begin(self, step: int) -> Coroutine[Any, Any, dict[str, float]] | None:
        """Takes an engine for an evaluation, after the previous one's has caught up; None if no engine can be spared.
        `step`: steps that the weights which the engines serve were trained for, their version. Returns the coroutine of
        `Evaluator.run`. It raises EvaluationLost if its engine is lost and no other one has the version."""
        await self._pool.none_held()
        engine = self._pool.hold()
        return None if engine is None else self._run(step, engine)

    async def _run(self, step: int, engine: Engine) -> dict[str, float]:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._evaluator.run(step, sample=held_sampler(self._pool, engine, step))
            except EvaluationLost as error:
                other = self._pool.hold() if self._pool.weights.version == step and attempt < ATTEMPTS else None
                if other is None:
                    raise
                logger.warning("the evaluation of step %d begins again on %s: %s", step, other.name, error)
            finally:
                self._pool.end_hold(engine)
            engine = other

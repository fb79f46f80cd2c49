"""Offsets of reward models that are the mean score of reference answers.

With it the reference answers score 0 on average (Stiennon et al., arXiv 2009.01325, sec. 3.4; Ouyang et al.,
arXiv 2203.02155, sec. 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pyarrow as pa
from pydantic import Field

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.runs.session import Session
from troupe.orchestrator.spec.derived.digests import identity
from troupe.orchestrator.spec.derived.sampling import Offset
from troupe.orchestrator.training.parts import Metrics, RunPart, UpdatedStep
from troupe.workers.contract.config_base import Frozen

_IN_A_CALL = 16
"""References that share a call. The same ones for any number of workers, so that the scores are the same."""


class Measured(Frozen):
    """A measured offset."""

    model: str
    """The reward model's `identity`."""
    value: float


class OffsetState(Frozen):
    """Measured offsets."""

    offsets: dict[str, dict[str, Measured]] = Field(default_factory=dict)
    """By the set of reward functions, then by reward model."""


class RewardOffsets(RunPart):
    """Measures offsets before the first step, and keeps them for the rest of the run."""

    name = "offsets"

    def __init__(self, session: Session, rewards: RewardPool) -> None:
        self.state = OffsetState()
        self._session = session
        self._rewards = rewards
        self._references = session.data.references

    async def open(self) -> None:
        """Measures the offsets that the run has not measured. Raises DataError if a reference answer has no score;
        WorkerError; StopRequested."""
        models = self._session.request.spec.rollouts.roles.reward.reward_models
        found: dict[str, dict[str, Measured]] = {}
        for offset, references in self._references.items():
            model = identity(models[offset.model])
            measured = self.state.offsets.get(offset.rewards, {}).get(offset.model)
            if measured is None or measured.model != model:
                measured = Measured(model=model, value=await self._measure(offset, references))
            found.setdefault(offset.rewards, {})[offset.model] = measured
        self.state = OffsetState(offsets=found)
        by_set = {rewards: {name: one.value for name, one in own.items()} for rewards, own in found.items()}
        self._rewards.set_offsets(by_set)

    async def _measure(self, offset: Offset, references: pa.Table) -> float:
        session = self._session
        session.console.phase("score the reference answers")
        starts = range(0, references.num_rows, _IN_A_CALL)
        parts = [session.cluster.put(references.slice(start, _IN_A_CALL).combine_chunks()) for start in starts]
        calls = gather_all(self._rewards.score_references(offset.model, part) for part in parts)
        scored = await session.unless_stopped(calls)
        if problem := next((one.problem for one in scored if one.problem), ""):
            raise DataError(f"{offset.path}: {problem}")
        value = fmean(score for one in scored for score in one.scores)
        of = ", ".join(f"data.{path}" for path in offset.sources)
        line = f"{offset.path}: {value:.6g}, the mean score of {references.num_rows} reference answers of {of}"
        session.console.message(line)
        session.cluster.events.record("offset", detail=line, value=value)
        return value

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        found = self.state.offsets
        return {one.metric: found[one.rewards][one.model].value for one in self._references if one.metric}

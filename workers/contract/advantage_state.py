"""State of the advantage estimators between batches: running statistics, rewards by prompt, adaptive KL coefficient.

The state is a value: preparing a batch takes one and returns the next. The controller keeps it between batches, and a
checkpoint stores it, so that a resumed run continues with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from troupe.workers.contract.config_base import Frozen

_MOST_ADAPTED = 2.0**30
"""Largest factor between an adaptive coefficient and its start value."""


def adapted_coef(coef: float, start: float) -> float:
    """A coefficient that follows a divergence, within a factor of 2^30 of its start value. Without these limits, after
    many steps on one side of the target, it would be 0, from where no factor brings it back, or infinite."""
    return min(max(coef, start / _MOST_ADAPTED), start * _MOST_ADAPTED)


class Moments(Frozen):
    """Count, mean and sum of squared deviations of the numbers seen so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def seen(self, values: Iterable[float]) -> Moments:
        """These moments with `values` added (Welford's update: no cancellation)."""
        count, mean, squares = self.count, self.mean, self.squares
        for value in values:
            count += 1
            step = value - mean
            mean += step / count
            squares += step * (value - mean)
        return Moments(count=count, mean=mean, squares=squares)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


class PromptHistory(Frozen):
    """Rewards of one prompt of the pool."""

    visits: int = 0
    """Batches that contained the prompt."""
    rewards: Moments = Moments()


class SourceMoments(Frozen):
    """Running statistics of the samples of one source, or of all samples."""

    rewards: Moments = Moments()
    """Sequence rewards of all batches, as the reward workers returned them."""
    returns: Moments = Moments()
    """Sequence returns of all batches: scaled, clipped, with their KL penalty."""
    components: Mapping[str, Moments] = Field(default_factory=dict)
    """Values of the reward components that are normalized, by label."""


class AdvantageState(Frozen):
    """Everything that is kept from one batch to the next."""

    kl_coef: float | None = None
    """The adaptive KL coefficient; None before the first batch or if `kl_target` is not set."""
    kl_start: float | None = None
    """Start value; None if `kl_coef` is None, and in the state of an earlier version."""
    rewards: Moments = Moments()
    """Sequence rewards of all batches, as the reward workers returned them."""
    returns: Moments = Moments()
    """Sequence returns of all batches: scaled, clipped, with their KL penalty."""
    components: Mapping[str, Moments] = Field(default_factory=dict)
    """Values of the reward components that are normalized, by label."""
    sources: Mapping[str, SourceMoments] = Field(default_factory=dict)
    """These statistics of each source, if they are computed within sources; then the ones above are not used."""
    players: Mapping[str, Mapping[str, float]] = Field(default_factory=dict)
    """Moving average of the returns by source (empty over all samples) and player (baseline player_average)."""
    prompts: Mapping[int, PromptHistory] = Field(default_factory=dict)
    """Histories by row of the prompt pool."""

    def kl_coef_from(self, start: float) -> float:
        """The adaptive KL coefficient of the next batch, with a start value that may differ from the state's."""
        if self.kl_coef is None or self.kl_start not in (None, start):
            return start
        return adapted_coef(self.kl_coef, start)

    def moments(self, source: str) -> SourceMoments:
        """The statistics of a source, or of all samples if empty."""
        if not source:
            return SourceMoments(rewards=self.rewards, returns=self.returns, components=self.components)
        return self.sources.get(source, SourceMoments())

    def with_moments(self, moments: Mapping[str, SourceMoments]) -> AdvantageState:
        """This state with other statistics, by source as in `moments`."""
        others = {name: own for name, own in moments.items() if name}
        update: dict[str, object] = {"sources": {**self.sources, **others}} if others else {}
        if (every := moments.get("")) is not None:
            update |= dict(every)
        return self.model_copy(update=update)

    def normalization(self) -> dict[str, float]:
        """Metrics: mean and standard deviation by which each component is normalized, of all samples or of a source."""
        parts = {"reward": self.components} | {f"source/{name}": own.components for name, own in self.sources.items()}
        return {
            f"{part}/{label}/{name}": value
            for part, components in parts.items()
            for label, seen in components.items()
            for name, value in (("running_mean", seen.mean), ("running_std", seen.std))
        }

    def of_rows(self, rows: Iterable[int]) -> AdvantageState:
        """The state with only these prompts. Its size does not grow with the run."""
        return self.model_copy(update={"prompts": {row: self.prompts[row] for row in rows if row in self.prompts}})

    def after(self, part: AdvantageState, *, policy_trains: bool = True) -> AdvantageState:
        """This state updated with `part`, the state after a batch prepared on `of_rows`. A batch on which the policy
        does not train has not steered the KL coefficient: the divergence of a frozen policy does not answer to it."""
        kl_coef = part.kl_coef if policy_trains else self.kl_coef
        return part.model_copy(update={"prompts": {**self.prompts, **part.prompts}, "kl_coef": kl_coef})

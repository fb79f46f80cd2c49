"""What advantages remember from batch to batch: running statistics, a prompt's earlier rewards, a steered coefficient.

The state is a value: preparing a batch takes one and gives the next, the controller keeps it between, and a checkpoint
holds it. A resumed run therefore goes on with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from workers.config import Frozen


class Moments(Frozen):
    """Count, mean and sum of squared deviations of numbers seen so far."""

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
        """Unbiased standard deviation; 0 of fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


class PromptHistory(Frozen):
    """What one prompt of the pool has earned."""

    visits: int = 0
    """Batches it was part of."""
    rewards: Moments = Moments()


class AdvantageState(Frozen):
    """Everything that outlasts a batch."""

    kl_coef: float | None = None
    """The steered KL coefficient; None before the first batch, and where nothing steers it."""
    rewards: Moments = Moments()
    """Sequence rewards of all batches, as the reward workers gave them."""
    returns: Moments = Moments()
    """Sequence returns of all batches, as they were credited: scaled, clipped, with their KL penalty."""
    prompts: Mapping[int, PromptHistory] = Field(default_factory=dict)
    """By row of the prompt pool."""

    def of_rows(self, rows: Iterable[int]) -> AdvantageState:
        """The part that concerns these prompts: what travels does not grow with the run."""
        return self.model_copy(update={"prompts": {row: self.prompts[row] for row in rows if row in self.prompts}})

    def after(self, part: AdvantageState) -> AdvantageState:
        """This state with what preparing a batch on `of_rows` made of it."""
        return part.model_copy(update={"prompts": {**self.prompts, **part.prompts}})

"""The loss scale of float16: a factor that keeps small gradients from being rounded to 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INITIAL_SCALE = 2.0**16
_HIGHEST = 2.0**24
"""Gradients of 0 never overflow, and would let the scale rise until it is infinite."""
_GROWS_AFTER = 1000
"""Updates in a row without an overflow after which the scale doubles, as in DeepSpeed."""


@dataclass
class LossScale:
    """A dynamic loss scale (mixed precision training, arXiv 1710.03740, sec. 3.2), a power of two.

    DeepSpeed multiplies the loss by it and divides the gradients by it. It changes between updates only: DeepSpeed's
    own scaler doubles in the middle of a step, whose gradients are then divided by twice what they were multiplied by.
    """

    value: float = INITIAL_SCALE
    """The scale of one rank."""
    finite: int = 0
    """Updates in a row without an overflow since the last change."""

    def for_ranks(self, ranks: int) -> float:
        """The scale of so many ranks.

        The loss is multiplied by the ranks besides, because DeepSpeed averages the gradients over them afterwards: with
        the scale of one rank, the first gradients of many would overflow, and their updates be skipped.
        """
        return self.value / 2 ** (ranks - 1).bit_length()

    def overflows(self, skipped: bool) -> bool:
        """Record an update; returns whether a gradient that is not finite is an overflow of the scaled loss.

        At a scale of 1 it is not: nothing was scaled.
        """
        overflowed = skipped and self.value > 1.0
        if skipped:
            self.value, self.finite = max(self.value / 2.0, 1.0), 0
        elif (finite := self.finite + 1) < _GROWS_AFTER:
            self.finite = finite
        else:
            self.value, self.finite = min(self.value * 2.0, _HIGHEST), 0
        return overflowed

    def state(self) -> torch.Tensor:
        """The scale for a checkpoint, float64 [2]."""
        return torch.tensor([self.value, float(self.finite)], dtype=torch.double)

    def restore(self, state: torch.Tensor) -> None:
        """Take over the scale of a checkpoint."""
        self.value, self.finite = float(state[0]), int(state[1])

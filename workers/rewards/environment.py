"""The reward component that an environment gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from troupe.workers.contract.config import RewardFunctionConfig
from troupe.workers.rewards.runner import RewardResult, Sample


@dataclass(frozen=True)
class EnvironmentReward:
    """The rewards that the environment gave during an episode: their sum, or with `process` each at its turn."""

    config: RewardFunctionConfig

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One outcome per sample; an episode without a reward has 0."""
        return [
            RewardResult(
                sum(reward for _, reward in s.turn_rewards), steps=s.turn_rewards if self.config.process else ()
            )
            for s in samples
        ]

"""The product's rollout worker with a different length for every sample, drawn from a long-tailed distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.support.workload import tail_length
from troupe.workers.agents.episodes.turns import TurnLimits
from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.engine.generation import Generation
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm import SamplingParams


class LongTailGeneration(Generation):
    """The product's generation, except for the `max_tokens` of each sample."""

    def sampling_params(self, request: GroupRequest, index: int, limits: TurnLimits | None = None) -> SamplingParams:
        """The product's, with another length."""
        params = super().sampling_params(request, index, limits)
        params.max_tokens = tail_length(request.seed, index, self.config.sampling.max_tokens)
        return params


class LongTailRollout(RolloutWorker):
    """The product's worker with this generation."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self.generation = LongTailGeneration(config, self.engine, self.weights.require_adapter)

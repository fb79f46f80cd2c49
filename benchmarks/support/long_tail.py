"""The product's rollout worker with a different length for every sample, drawn from a long-tailed distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.support.workload import tail_length
from troupe.workers.agents.episodes.turns import TurnLimits
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm import SamplingParams


class LongTailRollout(RolloutWorker):
    """The product's worker, except for the `max_tokens` of each sample."""

    def _sampling_params(self, request: GroupRequest, index: int, limits: TurnLimits | None = None) -> SamplingParams:
        params = super()._sampling_params(request, index, limits)
        params.max_tokens = tail_length(request.seed, index, self._config.sampling.max_tokens)
        return params

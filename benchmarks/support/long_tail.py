"""The product's rollout worker with a bound of its own for every sample, so that lengths have a long tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.workload import tail_length
from workers.messages import GroupRequest
from workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm import SamplingParams


class LongTailRollout(RolloutWorker):
    """Everything is the product's but for `max_tokens`."""

    def _sampling_params(self, request: GroupRequest, index: int) -> SamplingParams:
        params = super()._sampling_params(request, index)
        params.max_tokens = tail_length(request.seed, index, self._config.sampling.max_tokens)
        return params

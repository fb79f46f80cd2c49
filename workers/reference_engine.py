"""The engine of the reference: one vLLM engine whose weights stay, for responses that the policy is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.messages import GroupRequest, ReferenceResponse, WorkerGone
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.engine.rows import sampled_turn
from troupe.workers.engine.sleep import EngineSleep
from troupe.workers.rollout import RolloutWorker


class ReferenceEngine(RolloutWorker):
    """Samples responses of the reference as the rollout engines sample the policy's."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self.memory = EngineSleep(config.sleep, self.engine, frozen=True)

    async def complete(
        self, request: GroupRequest, prompt_ids: list[int], indices: Sequence[int]
    ) -> list[ReferenceResponse]:
        """Responses to a tokenized prompt with the seeds of the samples `indices`. Raises WorkerGone."""
        try:
            outputs = await self.generation.complete(request, prompt_ids, indices)
        except EngineClosed as error:
            raise WorkerGone(str(error)) from error
        turns = [sampled_turn(output) for output in outputs]
        name = self.engine.name
        return [ReferenceResponse(name, tuple(t.ids), t.finish_reason, t.generate_s, t.first_token_s) for t in turns]

    async def watch(self, seconds: float) -> bool:
        return await self.engine.watch(seconds)

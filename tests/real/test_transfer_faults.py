"""A rollout worker whose transfer of weights between GPUs failed: it joins the next one. The engine is a fake."""

from __future__ import annotations

from typing import Any

import pytest

from troupe.workers.contract.config import EngineConfig, ModelConfig, RolloutConfig, SamplingConfig
from troupe.workers.rollout import RolloutWorker, _State

pytestmark = pytest.mark.real


class FakeEngine:
    """What a rollout worker asks of vLLM in a transfer, with the session of vLLM's workers."""

    errored = False

    def __init__(self) -> None:
        self.engine_core = self
        self.active = False
        self.fails = False
        self.joined = 0

    async def pause_scheduler_async(self, **_: Any) -> None:
        """Nothing to pause."""

    async def resume_generation(self) -> None:
        """Nothing to resume."""

    async def collective_rpc(self, method: str) -> None:
        """Only the one that ends a session."""
        assert method == "troupe_forget_unfinished_update"
        self.active = False

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """A new communicator."""
        self.joined += 1

    async def start_weight_update(self) -> None:
        """As vLLM, refuse a second session."""
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.active = True

    async def update_weights(self, request: Any) -> None:
        """Receive, or fail."""
        if self.fails:
            raise RuntimeError("NCCL error: unhandled system error")

    async def finish_weight_update(self, version: str) -> None:
        """End the session."""
        self.active = False


def worker_of(engine: Any) -> RolloutWorker:
    """A worker that serves with this engine."""
    config = RolloutConfig(
        model=ModelConfig(path="x"),
        engine=EngineConfig(),
        sampling=SamplingConfig(),
        seed=1,
        transfer_backend="nccl",
        device="cpu",
    )
    worker = RolloutWorker(config, "rollout-0")
    worker._engine, worker._state = engine, _State.OPEN
    return worker


async def transfer(worker: RolloutWorker, version: int) -> None:
    """One transfer from the first call to the last."""
    await worker.transfer_init({})
    await worker.transfer_start()
    await worker.transfer_receive({})
    await worker.transfer_finish(version)


async def test_an_engine_that_a_failed_transfer_closed_joins_the_next_one() -> None:
    engine = FakeEngine()
    worker = worker_of(engine)
    await transfer(worker, 1)
    engine.fails = True
    with pytest.raises(RuntimeError, match="NCCL error"):
        await transfer(worker, 2)
    assert worker._state is _State.CLOSED, "nothing is sampled from half of an update"
    engine.fails = False
    await transfer(worker, 2)
    assert (worker._state, engine.joined) == (_State.OPEN, 3)


async def test_a_transfer_whose_trainer_died_does_not_block_the_next_one() -> None:
    engine = FakeEngine()
    worker = worker_of(engine)
    await worker.transfer_init({})
    await worker.transfer_start()
    await transfer(worker, 1)
    assert worker._state is _State.OPEN

"""A `PolicyWorker` in the process of a benchmark, without Ray."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from troupe.workers.policy import PolicyWorker

LEARNING_RATE = 1e-12
"""So small that all updates start from nearly equal weights."""


def policy_worker(given: argparse.Namespace, name: str, longest: int) -> PolicyWorker:
    """Start the only rank.

    Args:
        given: Has `model`, `dtype`, `micro_batch_tokens`, `threads`, `seed` and `device`.
        name: Of the run.
        longest: Most tokens of a response.
    """
    from troupe.workers.contract.config import (
        AdvantageConfig,
        ModelConfig,
        PolicyConfig,
        PolicyLossConfig,
        Rendezvous,
        SamplingConfig,
        TrainerConfig,
    )
    from troupe.workers.policy import PolicyWorker

    config = PolicyConfig(
        model=ModelConfig(path=str(given.model), dtype=given.dtype),
        trainer=TrainerConfig(
            micro_batch_tokens=given.micro_batch_tokens, learning_rate=LEARNING_RATE, threads=given.threads
        ),
        loss=PolicyLossConfig(),
        advantage=AdvantageConfig(estimator="group"),
        sampling=SamplingConfig(max_tokens=longest),
        run_id=name,
        reference_model=None,
        total_updates=1000,
        seed=given.seed,
        device=given.device,
    )
    worker = PolicyWorker(config, "policy-0")
    address, port = worker.rendezvous()
    worker.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
    return worker

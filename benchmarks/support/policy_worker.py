"""A `PolicyWorker` in the process of a benchmark, without Ray."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from troupe.workers.policy import PolicyWorker

LEARNING_RATE = 1e-12
"""So small that all updates start from nearly equal weights."""


def add_arguments(parser: argparse.ArgumentParser, groups: int) -> None:
    """Add the arguments of a benchmark that updates a policy: the model, its batch and the turns.

    Args:
        parser: Of the benchmark's command line.
        groups: Prompts in a batch by default.
    """
    add = parser.add_argument
    add("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--groups", type=int, default=groups)
    add("--samples", type=int, default=4, help="responses to each prompt (default: 4)")
    add("--prompt-tokens", type=int, default=64)
    add("--median-tokens", type=int, default=128, help="median length of a response (default: 128)")
    add("--sigma", type=float, default=0.8, help="standard deviation of the logarithm of the length (default: 0.8)")
    add("--micro-batch-tokens", type=int, default=2048)
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=17)


def policy_worker(given: argparse.Namespace, name: str, longest: int) -> PolicyWorker:
    """Start the only rank.

    Args:
        given: Has `model`, `dtype`, `micro_batch_tokens`, `threads`, `seed` and `device`.
        name: Of the run.
        longest: Most tokens of a response.
    """
    from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
    from troupe.workers.contract.config import PolicyConfig, Rendezvous, SamplingConfig
    from troupe.workers.contract.config_base import ModelConfig
    from troupe.workers.contract.trainer_config import TrainerConfig
    from troupe.workers.policy import PolicyWorker

    config = PolicyConfig(
        share_prompts=False,
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
    address, port = worker.rendezvous(one_host=True)
    worker.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
    return worker

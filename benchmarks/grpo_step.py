"""A whole GRPO step of the product, by phase, against a bare single-process loop on the same prompts.

    python -m benchmarks.grpo_step --groups 8 --samples 8 --max-tokens 32
    python -m benchmarks.grpo_step --kernels                                # and a bare loop on the product's kernels
    python -m benchmarks.grpo_step --trl                                    # and TRL's GRPOTrainer
    python -m benchmarks.grpo_step --trl --examples 8 --samples 16          # prompts of some hundred tokens

The product runs as with `troupe run`: controller, Ray, vLLM, DeepSpeed, rewards in sandboxed processes, verified weight
updates, trajectories written. Whenever it reports a step, its loop pauses while the other contenders take their turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.support.grpo_setup import BARE, take_steps
from benchmarks.support.harness import Report, command_parser, run_benchmark
from benchmarks.support.workload import DEVICE, Settings, add_settings


def measure(given: argparse.Namespace) -> Report:
    """Measure as many steps as turns, after a warm-up step. Raises what `take_steps` raises."""
    settings = Settings.of(given, engines=1)
    steps = take_steps(settings, given.turns + 1, given.learning_rate, given.trl, kernels=given.kernels)
    taken = {name: own[1:] for name, own in steps.taken.items()}
    return Report("grpo_step", taken, BARE, steps.checks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("grpo_step", __doc__, 5)
    defaults = {"groups": 8, "samples": 8, "examples": 0, "max_tokens": 32, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, micro_batch_tokens=1024, seed=17)
    add = parser.add_argument
    add("--lengths", choices=("fixed", "natural"), default="fixed", help="natural: the model ends its responses")
    add("--device", choices=("cpu", "cuda"), default="cpu", help=DEVICE)
    add("--learning-rate", type=float, default=1e-5)
    add(
        "--kernels",
        action="store_true",
        help="add the bare loop with the product's kernels and layout of micro-batches",
    )
    add("--trl", action="store_true", help="add TRL's GRPOTrainer; requires --lengths fixed")
    given = parser.parse_args(arguments)
    if given.trl and given.lengths != "fixed":
        parser.error("--trl requires --lengths fixed: TRL samples other responses, whose lengths would differ")
    return given


if __name__ == "__main__":
    run_benchmark(parse, measure)

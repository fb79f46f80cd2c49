"""Steps and seconds until training reaches a target reward, for the product, the bare loop and TRL.

    python -m benchmarks.time_to_reward --seeds 17 18 19 --json rewards.json

The task is to add two digits; the reward is 1 for the right sum. For each seed, all three train from the same model on
the same prompts, in alternation as in grpo_step, until they reach the target. Only the seconds of a contender's own
steps count, not loading. A baseline that misses the target in `--steps` steps counts with the seconds of all of them,
which is a lower bound. A seed takes half an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.support.grpo_setup import BARE, PRODUCT, ContenderSteps, take_steps
from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark
from benchmarks.support.workload import DEVICE, Settings, add_settings

RUNS = Unit("runs", "run", digits=4)


def steps_to(rewards: Sequence[float], target: float, window: int) -> int | None:
    """Number of steps until the mean reward of `window` consecutive steps reaches `target`; None if it never does."""
    for done in range(window, len(rewards) + 1):
        if fmean(rewards[done - window : done]) >= target:
            return done
    return None


def best(rewards: Sequence[float], window: int) -> float:
    """The highest mean reward of `window` consecutive steps."""
    return max(fmean(rewards[done - window : done]) for done in range(window, len(rewards) + 1))


def to_target(name: str, steps: ContenderSteps, target: float, window: int) -> Turn:
    """A contender's run up to the target as one turn.

    A baseline that misses the target counts with all its steps, which is a lower bound of its time.

    Raises:
        NotCorrect: The product misses the target.
    """
    rewards = steps.rewards[name]
    reached = steps_to(rewards, target, window)
    if reached is None and name == PRODUCT:
        raise NotCorrect(
            f"{name} reached a reward of {best(rewards, window):.4f} in {len(rewards)} steps, less than the target "
            f"of {target:g}"
        )
    needed = reached or len(rewards)
    taken = steps.taken[name][:needed]
    return Turn(
        wall_s=sum(turn.wall_s for turn in taken),
        amount=1.0,
        cpu_s=sum(turn.cpu_s for turn in taken),
        foreign_cores=fmean(turn.foreign_cores for turn in taken),
        figures={"steps": float(needed), "first reward": rewards[0], "last reward": rewards[needed - 1]},
    )


def missed_target(steps: ContenderSteps, target: float, window: int) -> dict[str, str]:
    """The contenders that missed the target, with the highest reward they reached."""
    return {
        name: f"target missed: {best(rewards, window):.4f} at best; all {len(rewards)} steps count"
        for name, rewards in steps.rewards.items()
        if steps_to(rewards, target, window) is None
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("time_to_reward", __doc__)
    add = parser.add_argument
    defaults = {"groups": 16, "samples": 8, "max_tokens": 12, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, micro_batch_tokens=1024)
    parser.set_defaults(dtype="float32")
    add("--device", choices=("cpu", "cuda"), default="cpu", help=DEVICE)
    add("--learning-rate", type=float, default=3e-5)
    add("--target", type=float, default=0.8, help="mean reward to reach (default: 0.8)")
    add(
        "--window",
        type=int,
        default=1,
        help="number of consecutive steps that the reward is averaged over (default: 1)",
    )
    add("--steps", type=int, default=20, help="maximum number of steps (default: 20)")
    add("--seeds", type=int, nargs="+", default=[17, 18, 19], help="seeds, one run each (default: 17 18 19)")
    add("--json", type=Path, default=None, help="results file (default: benchmarks/results/)")
    add("--no-trl", dest="trl", action="store_false", help="leave out TRL")
    return parser.parse_args(arguments)


def measure(given: argparse.Namespace) -> Report:
    """Run every seed.

    Raises:
        NotCorrect: A check failed.
        TroupeError: A run failed.
    """
    settings = Settings.of(given, lengths="natural", task="sums", engines=1, seed=0)

    def reached(rewards: Sequence[float]) -> bool:
        return steps_to(rewards, given.target, given.window) is not None

    taken: dict[str, list[Turn]] = {}
    checks: dict[str, str] = {}
    for seed in given.seeds:
        steps = take_steps(replace(settings, seed=seed), given.steps, given.learning_rate, given.trl, reached)
        for name in steps.taken:
            taken.setdefault(name, []).append(to_target(name, steps, given.target, given.window))
        found = steps.checks | missed_target(steps, given.target, given.window)
        checks |= {f"seed {seed}, {check}": outcome for check, outcome in found.items()}
    return Report("time_to_reward", taken, BARE, checks, RUNS)


if __name__ == "__main__":
    run_benchmark(parse, measure)

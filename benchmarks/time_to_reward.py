"""Steps and seconds until what is sampled earns a reward, for the product, the bare loop and TRL.

    python -m benchmarks.time_to_reward --seeds 17 18 19 --json rewards.json

The task is to add two digits; the reward is 1 for the right sum. Every seed is a training run of all three from the
same model on the same prompts, in turns as in grpo_step, each until it is there. Seconds are those of a contender's own
steps; loading is left out. One that is not there in `--steps` counts with the seconds it took: it would take more.
A seed takes half an hour, so each is written to the file when it is done, with the machine it ran on, and a command
with the same file and settings measures only the seeds that it lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from benchmarks.grpo_step import BARE, PRODUCT, Steps, take_steps
from benchmarks.harness import NotCorrect, Report, Turn, Unit, carry_out, machine, versions, where
from benchmarks.workload import DEVICE, Settings, add_settings

RUNS = Unit("runs", "run", digits=4)


def steps_to(rewards: Sequence[float], target: float, window: int) -> int | None:
    """Steps until the mean of the last `window` steps' rewards is at least `target`; None where it never is."""
    for done in range(window, len(rewards) + 1):
        if fmean(rewards[done - window : done]) >= target:
            return done
    return None


def best(rewards: Sequence[float], window: int) -> float:
    """The highest mean of `window` steps in a row."""
    return max(fmean(rewards[done - window : done]) for done in range(window, len(rewards) + 1))


def to_target(name: str, steps: Steps, target: float, window: int) -> Turn:
    """A contender's run up to the target; all of it where another than the product never was there: at least so long.

    Raises NotCorrect where the product was not.
    """
    rewards = steps.rewards[name]
    there = steps_to(rewards, target, window)
    if there is None and name == PRODUCT:
        raise NotCorrect(f"{name} came to a reward of {best(rewards, window):.4f} in {len(rewards)} steps")
    needed = there or len(rewards)
    taken = steps.taken[name][:needed]
    return Turn(
        wall_s=sum(turn.wall_s for turn in taken),
        amount=1.0,
        cpu_s=sum(turn.cpu_s for turn in taken),
        foreign_cores=fmean(turn.foreign_cores for turn in taken),
        figures={"steps": float(needed), "first reward": rewards[0], "last reward": rewards[needed - 1]},
    )


def never_there(steps: Steps, target: float, window: int) -> dict[str, str]:
    """By contender, what it came to where that was less than the target."""
    return {
        name: f"not there: {best(rewards, window):.4f} at best; all its {len(rewards)} steps count"
        for name, rewards in steps.rewards.items()
        if steps_to(rewards, target, window) is None
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_reward", description=__doc__)
    add = parser.add_argument
    defaults = {"groups": 16, "samples": 8, "max_tokens": 12, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, micro_batch_tokens=1024)
    parser.set_defaults(dtype="float32")
    add("--device", choices=("cpu", "cuda"), default="cpu", help=DEVICE)
    add("--learning-rate", type=float, default=3e-5)
    add("--target", type=float, default=0.8, help="mean reward of the samples of a step")
    add("--window", type=int, default=1, help="steps that the reward is the mean of")
    add("--steps", type=int, default=20, help="at most")
    add("--seeds", type=int, nargs="+", default=[17, 18, 19], help="one run each")
    add("--no-trl", dest="trl", action="store_false", help="without TRL")
    return parser.parse_args(arguments)


def earlier(path: Path | None, fresh: Report) -> Report:
    """What the file holds already of the same settings, or else `fresh`, which is empty.

    On whatever machine: the contenders of a seed share one, and only their ratio is compared with other seeds'.
    """
    if path is None or not path.is_file():
        return fresh
    document = json.loads(path.read_text())
    arguments = json.loads(json.dumps(fresh.arguments, default=str))
    if document["arguments"] | {"seeds": []} != arguments:
        return fresh
    taken = {name: [Turn(**turn) for turn in turns] for name, turns in document["turns"].items()}
    seeds = document["arguments"]["seeds"]
    return replace(fresh, taken=taken, checks=document["checks"], arguments=fresh.arguments | {"seeds": seeds})


def measure(settings: Settings, given: argparse.Namespace) -> Report:
    """One run for each seed. Raises NotCorrect, and TroupeError where a run fails."""

    def there(rewards: Sequence[float]) -> bool:
        return steps_to(rewards, given.target, given.window) is not None

    settled = {key: vars(given)[key] for key in ("learning_rate", "target", "window", "steps", "trl")}
    arguments = asdict(settings) | settled | {"seeds": []}
    report = earlier(given.json, Report("time_to_reward", arguments, {}, BARE, {}, RUNS))
    for seed in given.seeds:
        if seed in report.arguments["seeds"]:
            continue
        steps = take_steps(replace(settings, seed=seed), given.steps, given.learning_rate, given.trl, there)
        taken = {
            name: [*report.taken.get(name, ()), to_target(name, steps, given.target, given.window)]
            for name in steps.taken
        }
        found = (
            {"machine": where(machine(), versions(), f"{datetime.now(UTC):%Y-%m-%d}")}
            | steps.checks
            | never_there(steps, given.target, given.window)
        )
        checks = report.checks | {f"seed {seed}, {check}": outcome for check, outcome in found.items()}
        seeds = [*report.arguments["seeds"], seed]
        report = replace(report, taken=taken, checks=checks, arguments=report.arguments | {"seeds": seeds})
        if given.json is not None:
            report.write(given.json)
    return report


def main() -> None:
    """Measure, print, write."""
    given = parse(sys.argv[1:])
    settings = Settings(
        model=given.model,
        dtype=given.dtype,
        lengths="natural",
        task="sums",
        groups=given.groups,
        samples=given.samples,
        max_tokens=given.max_tokens,
        concurrency=given.concurrency,
        engines=1,
        threads=given.threads,
        micro_batch_tokens=given.micro_batch_tokens,
        device=given.device,
        seed=0,  # each run has its own
    )
    carry_out(lambda: measure(settings, given), given.json)


if __name__ == "__main__":
    main()

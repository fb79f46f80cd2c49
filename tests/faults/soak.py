"""A run in which workers of every role are killed at random: effective training time, recovery by role, memory.

    python -m tests.faults.soak                                      # the tiny model, PPO with every role
    python -m tests.faults.soak --spec deploy/specs/laptop-grpo.yaml --steps 40

Effective training time ratio: steps times the median step before the first kill, divided by the seconds that these
steps took with the kills.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.conftest import ROOT
from tests.faults.injected import WORKERS, Signalled, left_behind, stop_group
from tests.real.commands import PPO, Run, ledger_balances, running

WARM_UP = 5
"""Steps before the first kill, by which the length of a step is measured."""
BUDGETS = tuple(f"failures.{role}_restarts=1000" for role in ("trainer", "engine", "reward", "reference"))


def soak(run: Run, steps: int, share: float, seed: int) -> Mapping[str, Any]:
    """Train `steps` steps and kill a worker in a share of them; what was measured."""
    rng = random.Random(seed)
    hit = sorted(rng.sample(range(WARM_UP + 1, WARM_UP + steps + 1), round(share * steps)))
    run.wait_for_step(WARM_UP)
    roles = {role: title for role, title in WORKERS.items() if run.processes(title)}
    step_s = median(line["seconds/step"] for line in run.metrics[1:])
    recoveries: dict[str, list[float]] = {role: [] for role in roles}
    began = time.monotonic()
    for step in hit:
        run.wait_until(lambda step=step: run.steps()[-1] >= step, f"step {step}")
        role = rng.choice(list(roles))
        outcome = Signalled(role, roles[role], signal.SIGKILL).inject(run)
        if not outcome.ok or outcome.recovered_s is None:
            raise RuntimeError(f"{outcome}\n{run.output[-3000:]}")
        recoveries[role].append(outcome.recovered_s)
    run.wait_until(lambda: run.steps()[-1] >= WARM_UP + steps, "the last step")
    seconds = time.monotonic() - began
    done = run.steps()[-1] - WARM_UP
    stop_group(run, signal.SIGTERM)
    run.wait(120)
    lines = run.metrics
    if run.steps() != list(range(1, len(lines) + 1)) or not all(map(ledger_balances, lines)):
        raise RuntimeError("the ledger does not balance")
    return {
        "steps": done,
        "kills": sum(map(len, recoveries.values())),
        "step_s": step_s,
        "ratio": done * step_s / seconds,
        "recovery_s": {role: _spread(times) for role, times in recoveries.items() if times},
        "dropped": lines[-1]["ledger/dropped"],
        "driver_mib_per_100_steps": _slope([line["memory/driver"] for line in lines]) * 1024 * 100,
        "left_behind": left_behind(run),
    }


def _spread(times: list[float]) -> dict[str, float]:
    """Number, median and 95th percentile (nearest rank)."""
    ordered = sorted(times)
    return {"n": len(ordered), "p50": median(ordered), "p95": ordered[max(0, -(-95 * len(ordered) // 100) - 1)]}


def _slope(values: list[float]) -> float:
    """Least-squares slope of the second half of a series, per entry."""
    half = values[len(values) // 2 :]
    middle, mean = (len(half) - 1) / 2, sum(half) / len(half)
    spread = sum((place - middle) ** 2 for place in range(len(half)))
    return sum((place - middle) * (value - mean) for place, value in enumerate(half)) / spread if spread else 0.0


def main(arguments: list[str]) -> None:
    """Run the soak and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=PPO)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.1, help="share of the steps that are hit (default: 0.1)")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="FIELD=VALUE of the spec")
    given = parser.parse_args(arguments)
    endless = ("schedule.steps=100000", "checkpoint.every_steps=10", *BUDGETS)
    with tempfile.TemporaryDirectory() as folder:
        overrides = (*endless, *given.overrides)
        with running(Run(Path(folder), ROOT / given.spec, *overrides, name="soak")) as run:
            sys.stdout.write(json.dumps(soak(run, given.steps, given.share, given.seed), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

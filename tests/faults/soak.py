"""A run in which workers of every role are killed at random: effective training time, recovery by role, memory.

    python -m tests.faults.soak --minutes 30                         # the tiny model, PPO with every role
    python -m tests.faults.soak --spec deploy/specs/laptop-grpo.yaml --every-s 300

The share that it prints is the effective training time: steps a second with the kills, divided by the steps a second of
the same run in the minutes before the first kill (`--undisturbed-minutes`).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from tests.conftest import ROOT
from tests.faults.injected import ENGINE, WORKERS, Signalled, left_behind, stop_group
from tests.real.commands import PPO, Run, ledger_balances, running

WARM_UP = 10
"""Steps before anything is measured."""
BUDGETS = tuple(f"failures.{role}_restarts=1000" for role in ("trainer", "engine", "reward", "reference"))


def order_of_roles(roles: Sequence[str], kills: int, seed: int) -> list[str]:
    """The role that each kill hits: each of them once, in random order, before any is hit again."""
    rng = random.Random(seed)
    rounds = (rng.sample(roles, len(roles)) for _ in range(-(-kills // len(roles))))
    return list(chain.from_iterable(rounds))[:kills]


def soak(run: Run, seconds: float, undisturbed_s: float, every_s: float, seed: int) -> Mapping[str, Any]:
    """Train undisturbed, then kill a worker at a random moment of each `every_s` seconds; what was measured."""
    rng = random.Random(seed)
    run.wait_for_step(WARM_UP)
    # Teachers have the class of references, which comes first.
    named = {title: role for role, title in reversed((*WORKERS.items(), ("engine", ENGINE)))}
    targets = {role: title for title, role in named.items() if run.processes(title)}
    began, first = time.monotonic(), run.steps()[-1]
    time.sleep(undisturbed_s)
    undisturbed = (run.steps()[-1] - first) / (time.monotonic() - began)
    recoveries: dict[str, list[float]] = {role: [] for role in targets}
    began, first = time.monotonic(), run.steps()[-1]
    for number, role in enumerate(order_of_roles(list(targets), round(seconds / every_s), seed)):
        time.sleep(max(0.0, began + (number + rng.random()) * every_s - time.monotonic()))
        outcome = Signalled(role, targets[role], signal.SIGKILL).inject(run)
        if not outcome.ok or outcome.recovered_s is None:
            raise RuntimeError(f"{outcome}\n{run.output[-3000:]}")
        recoveries[role].append(outcome.recovered_s)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    took, done = time.monotonic() - began, run.steps()[-1] - first
    stop_group(run, signal.SIGTERM)
    run.wait(120)
    lines = run.metrics
    if run.steps() != list(range(1, len(lines) + 1)) or not all(map(ledger_balances, lines)):
        raise RuntimeError("the ledger does not balance")
    return {
        "steps": done,
        "kills": sum(map(len, recoveries.values())),
        "steps_a_second": done / took,
        "steps_a_second_undisturbed": undisturbed,
        "share": done / took / undisturbed,
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
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes with kills (default: 30)")
    parser.add_argument("--undisturbed-minutes", type=float, default=5.0, help="minutes before them (default: 5)")
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds with one kill each (default: 60)")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="FIELD=VALUE of the spec")
    given = parser.parse_args(arguments)
    endless = ("schedule.steps=100000", "checkpoint.every_steps=10", *BUDGETS)
    with tempfile.TemporaryDirectory() as folder:
        overrides = (*endless, *given.overrides)
        with running(Run(Path(folder), ROOT / given.spec, *overrides, name="soak")) as run:
            seen = soak(run, 60.0 * given.minutes, 60.0 * given.undisturbed_minutes, given.every_s, given.seed)
            sys.stdout.write(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Time of a step against the slower of generation and training, by staleness.

    python -m benchmarks.pipeline_bubble --groups 32 --train-ms 300
    python -m benchmarks.pipeline_bubble --virtual --engines 1024 --slots 8 --groups 4096 --slow-engines 8

Simulated workers only wait: a group takes a time from a long-tailed distribution, an update a constant time. R is the
time that the groups of a step take on all slots of all engines without idle slots, and T the time of the update, so no
schedule is faster than max(R, T). The difference to it is the loss from the product's own schedule. Engines of a slow
node take longer for the same groups. On virtual time nothing waits, so that a run may have a thousand engines.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter
from benchmarks.support.simulated import Shape, SimPolicy, SimulatedWorkers, Simulation, check
from tests.clock import on_virtual_time
from tests.fakes import FakeEngine, LocalWorker
from troupe.workers.contract.messages import GroupRequest

BOUND = "bound"
STALENESS = "mean staleness of a sample"
UNIT = Unit("max(R, T) seconds", "second", digits=3)
SAMPLES = 8
TAIL = 0.8
"""Sigma of the lognormal lengths: the longest of 16 groups is about three times the mean."""
LONGEST = 6.0
"""Lengths are truncated at this multiple of their mean, as `max_tokens` truncates responses."""

LONGEST_S = 1e6
"""Bound on a call, and time between two probes, on virtual time: seconds there may be minutes of a real run."""


@dataclass(frozen=True)
class Times:
    """Durations of generation and training."""

    mean_s: float
    """Mean time of a group on its engine."""
    train_s: float
    """Time of an update."""
    seed: int
    slow: int = 0
    """How many engines, the first ones, are slow."""
    factor: float = 1.0
    """How many times as long a slow engine takes."""

    def factor_of(self, engine: int) -> float:
        """How many times as long this engine takes as most."""
        return self.factor if engine < self.slow else 1.0

    def of(self, row: int) -> float:
        """Seconds of the group of this prompt, which are the same in every run."""
        draw = random.Random(f"{self.seed}-{row}").lognormvariate(-TAIL * TAIL / 2, TAIL)
        return self.mean_s * min(draw, LONGEST)


def measured_steps(shape: Shape) -> range:
    """Steps (from 0) in the steady state, after the pipeline has filled and before it drains."""
    edge = shape.staleness + 1
    return range(edge, shape.steps - edge)


def stages_s(shape: Shape, times: Times, rows: Sequence[Sequence[int]]) -> tuple[float, float]:
    """(R, T), in seconds, of steps with these prompts.

    Args:
        shape: The engines and slots.
        times: The durations.
        rows: Rows of the prompts of each step.
    """
    speeds = sum(1.0 / times.factor_of(engine) for engine in range(shape.engines))
    generate = sum(times.of(row) for step in rows for row in step) / (shape.slots * speeds)
    return generate, times.train_s * len(rows)


async def pipeline_turn(shape: Shape, times: Times) -> Turn:
    """Run once and measure the steady steps, against the bound for the groups trained in them. Raises NotCorrect."""
    policy = SimPolicy(update_s=times.train_s)
    taken: list[tuple[str, float]] = []

    def engine(number: int) -> LocalWorker[FakeEngine]:
        factor, name = times.factor_of(number), f"rollout-{number}"

        def work(request: GroupRequest) -> float:
            seconds = factor * times.of(request.row)
            taken.append((request.prompt_uid, seconds))
            return seconds

        return LocalWorker(name, FakeEngine(name, work))

    engines = [engine(number) for number in range(shape.engines)]
    simulation = Simulation(shape, replace(SimulatedWorkers.local(shape, policy), engines=engines))
    meter = Meter([])
    began = time.process_time()
    outcome, _ = await simulation.run()
    cpu_s = time.process_time() - began
    _, foreign = meter.read()
    check(shape, outcome, policy)
    if len(dict(taken)) != len(taken) or len(taken) != shape.steps * shape.groups:
        raise NotCorrect(
            f"the engines received {len(taken)} groups, expected {shape.steps * shape.groups} distinct ones"
        )
    steps = measured_steps(shape)
    ticks = simulation.clock.ticks
    wall_s = ticks[steps.stop - 1].wall - ticks[steps.start - 1].wall
    rows = [[row_of(uid) for uid in dict.fromkeys(uid for uid, _ in policy.prepared[step])] for step in steps]
    generate_s, train_s = stages_s(shape, times, rows)
    parts = {"step, s": wall_s, "R of a step, s": generate_s, "T of a step, s": train_s}
    figures = {name: seconds / len(steps) for name, seconds in parts.items()}
    figures[STALENESS] = fmean(ticks[step].staleness for step in steps)
    return Turn(wall_s, max(generate_s, train_s), cpu_s, foreign, figures=figures)


def row_of(uid: str) -> int:
    """The row of a prompt from its uid, `e<epoch>-r<row>`."""
    return int(uid.rpartition("r")[2])


async def measure(given: argparse.Namespace) -> Report:
    """Alternate the turns of all stalenesses. Raises NotCorrect."""
    shape = Shape(given.engines, given.slots, given.groups, SAMPLES, 0, given.steps)
    if given.virtual:
        shape = replace(shape, timeout_s=LONGEST_S, probe_every_s=LONGEST_S)
    slow, factor = given.slow_engines, given.slow_factor
    times = Times(given.mean_ms / 1e3, given.train_ms / 1e3, given.seed, slow, factor)

    def contender(bound: int) -> Callable[[int], Any]:
        async def take(turn: int) -> Turn:
            run = pipeline_turn(replace(shape, staleness=bound), replace(times, seed=times.seed + turn))
            return await (asyncio.to_thread(on_virtual_time, run) if given.virtual else run)

        return take

    async def ideal(turn: int) -> Turn:
        return Turn(1.0, 1.0, 0.0, 0.0)

    everyone = {BOUND: ideal} | {f"staleness {bound}": contender(bound) for bound in given.staleness}
    taken = await take_turns(everyone, given.turns)
    checks = {
        "ledger": f"every turn dispatched and trained {shape.steps} x {shape.sequences} sequences, none twice",
        "engines": f"every turn sampled its {shape.steps * shape.groups} groups once",
    }
    return Report("pipeline_bubble", taken, BOUND, checks, UNIT)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("pipeline_bubble", __doc__, 5)
    add = parser.add_argument
    add("--groups", type=int, default=32, help="prompts per step")
    add("--engines", type=int, default=4)
    add("--slots", type=int, default=4, help="groups that one engine samples at once")
    add("--mean-ms", type=float, default=200.0, help="mean time of a group on its engine")
    add("--train-ms", type=float, default=300.0, help="time of an update")
    add("--slow-engines", type=int, default=0, help="engines that take --slow-factor times as long")
    add("--slow-factor", type=float, default=3.0)
    add("--virtual", action="store_true", help="on virtual time: nothing waits, and the machine's load plays no part")
    add("--staleness", type=int, nargs="+", default=[0, 1, 4])
    add(
        "--steps",
        type=int,
        default=30,
        help="steps per turn, including those in which the pipeline fills and drains, which are not measured",
    )
    add("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

"""Sequences per second and dispatch latency with 1 000 to 16 000 simulated engines, some of which die.

    python -m benchmarks.controller_scale --engines 1000 4000 16000

Each turn of a size makes two runs. In the first, engines answer at once and a step has one group per engine, so that
the controller is the only bottleneck: it gives sequences per second. In the second, the engines together finish
`--load` groups per second, whatever their number: it gives the dispatch latency, from the end of an engine's group to
the start of its next one while a group is available. In both runs, engines die and are replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.support.harness import SEQUENCES, NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter
from benchmarks.support.simulated import Clock, Shape, SimPolicy, SimulatedWorkers, Simulation, check
from tests.fakes import FakeEngine, LocalWorker
from troupe.orchestrator.data.prompts import PromptPick
from troupe.workers.contract.messages import GroupRequest, WorkerGone

WARM_STEPS = 1
_RESTARTS = 1_000_000
"""As many as the faults need: an engine that is not replaced would make the turn a smaller one."""


@dataclass
class Waits:
    """Records how long engines wait while a group is available."""

    free_since: dict[str, float] = field(default_factory=dict)
    """By engine, when its last group was due to end, even if the event loop noticed later. Engines that have not
    sampled yet are missing."""
    drawn_at: dict[str, float] = field(default_factory=dict)
    """By prompt_uid, when the prompt was drawn and its group became available."""
    seconds: list[float] = field(default_factory=list)
    """Dispatch latency of each group."""
    died: int = 0
    """Number of engines that died."""

    def drawn(self, pick: PromptPick) -> None:
        """Record that a prompt was drawn and its group is available."""
        self.drawn_at[pick.prompt_uid] = time.perf_counter()

    def begins(self, engine: str, request: GroupRequest) -> None:
        """Record that an engine starts a group."""
        free_since = self.free_since.get(engine)
        if free_since is not None:
            self.seconds.append(time.perf_counter() - max(free_since, self.drawn_at[request.prompt_uid]))


@dataclass(frozen=True)
class Faults:
    """Decides which groups kill their engine."""

    every: int
    """Average number of groups per death."""
    seed: int

    def kills(self, request: GroupRequest) -> bool:
        """Whether this attempt kills its engine."""
        return random.Random(f"{self.seed}-{request.prompt_uid}-{request.attempt}").randrange(self.every) == 0


Seconds = Callable[[bool], float]
"""Seconds that a group takes; the argument says whether it is the engine's first group."""


class WatchedEngine(FakeEngine):
    """A simulated engine that may die during a group, and records when it starts and ends one."""

    def __init__(self, name: str, seconds: Seconds, faults: Faults, waits: Waits) -> None:
        super().__init__(name, self._time)
        self._group_seconds = seconds
        self._over = 0.0
        self._faults = faults
        self._waits = waits

    async def generate(self, request: GroupRequest, prompts: object, finished: Any = None) -> Any:
        """Sample one group. Raises WorkerGone where the engine dies."""
        waits = self._waits
        waits.begins(self.name, request)
        answer = await super().generate(request, prompts, finished)
        if self._faults.kills(request):
            waits.died += 1
            waits.free_since.pop(self.name, None)  # the replacement engine takes this name
            raise WorkerGone("killed by the benchmark")
        waits.free_since[self.name] = self._over
        return answer

    def _time(self, request: GroupRequest) -> float:
        seconds = self._group_seconds(self.name not in self._waits.free_since)
        self._over = time.perf_counter() + seconds
        return seconds


@dataclass(frozen=True)
class Load:
    """The work of a turn."""

    samples: int
    """Samples per group."""
    saturated_groups: int
    """Minimum number of groups measured in the saturated run, whose engines answer at once."""
    paced_groups: int
    """Groups per step in the paced run, whose engines take time."""
    paced_steps: int
    """Steps of the paced run in which latency is measured."""
    groups_per_s: float
    """Groups per second that all engines of the paced run finish together."""
    fault_every: int
    """Average number of groups per death of an engine."""

    def saturated(self, engines: int) -> Shape:
        """The saturated run: one group per engine and step; one step is sampled while the previous one is trained."""
        measured = -(-self.saturated_groups // engines)
        return Shape(engines, 1, engines, self.samples, 1, WARM_STEPS + measured + 1, restarts=_RESTARTS)

    def paced(self, engines: int) -> Shape:
        """The paced run: enough open steps that a group is always available. It is stopped before its last step."""
        staleness = -(-3 * engines // (2 * self.paced_groups))
        steps = WARM_STEPS + self.paced_steps + staleness + 1
        return Shape(engines, 1, self.paced_groups, self.samples, staleness, steps, restarts=_RESTARTS)


async def simulate(shape: Shape, seconds: Seconds, faults: Faults, stop_at: int) -> tuple[Waits, Clock]:
    """Run to the end of step `stop_at`.

    Returns:
        The waits after the warm-up, and the times of the steps.

    Raises:
        NotCorrect: A sequence or an engine is not accounted for.
    """
    waits, policy, stop = Waits(), SimPolicy(), asyncio.Event()

    def on_step(step: int) -> None:
        if step == WARM_STEPS:
            waits.seconds.clear()
        if step == stop_at:
            stop.set()

    def engine(name: str) -> LocalWorker[FakeEngine]:
        return LocalWorker(name, WatchedEngine(name, seconds, faults, waits))

    engines = [engine(f"rollout-{i}") for i in range(shape.engines)]
    workers = replace(SimulatedWorkers.local(shape, policy), engines=engines, spawn=engine)
    simulation = Simulation(shape, workers, Clock(on_step), waits.drawn, stop)
    outcome, pool = await simulation.run()
    check(replace(shape, steps=stop_at), outcome, policy)
    if not waits.died == pool.budget.total == outcome.ledger["retries"]:
        raise NotCorrect(
            f"{waits.died} engines died, but the pool counts {pool.budget.total} restarts and the ledger has "
            f"{outcome.ledger}"
        )
    return waits, simulation.clock


async def scale_turn(engines: int, load: Load, seed: int) -> Turn:
    """Make both runs of one size. Raises NotCorrect."""
    faults = Faults(load.fault_every, seed)
    shape = load.saturated(engines)
    meter = Meter()
    fast, clock = await simulate(shape, lambda first: 0.0, faults, shape.steps)
    _, foreign = meter.read()
    first, last = clock.ticks[WARM_STEPS - 1], clock.ticks[-2]
    sequences = (shape.steps - WARM_STEPS - 1) * shape.sequences
    mean_s = engines / load.groups_per_s
    rng = random.Random(seed)

    def seconds(first: bool) -> float:
        return mean_s * (rng.uniform(0.0, 1.0) if first else rng.uniform(0.5, 1.5))

    paced, _ = await simulate(load.paced(engines), seconds, faults, WARM_STEPS + load.paced_steps)
    p50, p99 = (1e3 * value for value in np.percentile(paced.seconds, (50, 99)))
    figures = {
        "p50 dispatch, ms": p50,
        "p99 dispatch, ms": p99,
        "longest dispatch, ms": 1e3 * max(paced.seconds),
        "dispatches": float(len(paced.seconds)),
        "engines that died": float(fast.died + paced.died),
    }
    return Turn(last.wall - first.wall, sequences, last.cpu - first.cpu, foreign, figures=figures)


def name_of(engines: int) -> str:
    """The contender's name."""
    return f"{engines} engines"


async def measure(given: argparse.Namespace) -> Report:
    """Alternate the turns of all sizes; the first size is the baseline. Raises NotCorrect."""
    logging.getLogger("troupe").setLevel(logging.CRITICAL)  # the pool logs every death
    sizes: list[int] = given.engines
    load = Load(
        given.samples,
        given.saturated_groups,
        given.paced_groups,
        given.paced_steps,
        given.load,
        given.fault_every,
    )

    def contender(engines: int) -> Callable[[int], Any]:
        async def take(turn: int) -> Turn:
            return await scale_turn(engines, load, turn)

        return take

    taken = await take_turns({name_of(engines): contender(engines) for engines in sizes}, given.turns)
    checks = {
        "ledger": "in every run every sequence dispatched was trained or still in flight, none twice, none dropped",
        "engines": "every engine that died was replaced, and its group sampled again, once",
    }
    return Report("controller_scale", taken, name_of(sizes[0]), checks, SEQUENCES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("controller_scale", __doc__, 5)
    add = parser.add_argument
    add(
        "--engines",
        type=int,
        nargs="+",
        default=[1000, 4000, 16000],
        help="numbers of engines; the first is the baseline",
    )
    add("--samples", type=int, default=8, help="samples per prompt")
    add("--saturated-groups", type=int, default=16000, help="minimum number of groups measured in the first run")
    add("--paced-groups", type=int, default=256, help="groups per step in the second run")
    add("--paced-steps", type=int, default=4, help="steps measured in the second run")
    add("--load", type=float, default=100.0, help="groups per second that all engines finish in the second run")
    add("--fault-every", type=int, default=1000, help="average number of groups per death of an engine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

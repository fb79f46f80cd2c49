"""Sequences per second and dispatch latency with 1 000 to 16 000 simulated engines, some of which die.

    python -m benchmarks.controller_scale --engines 1000 4000 16000

Two runs a turn and size. In the first, engines answer at once and a step has one group for each, so that the controller
is all there is to wait for: its sequences per second. In the second, engines take so long over a group that all of them
together finish `--load` groups a second, whatever their number: how long an engine whose group is done waits for the
next one, which is there. In both, engines die and are replaced meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import SEQUENCES, NotCorrect, Report, Turn, carry_out, take_turns
from benchmarks.processes import Meter
from benchmarks.simulated import Clock, LocalWorker, Shape, SimEngine, SimPolicy, Simulation, Stage, check
from orchestrator.metrics import percentiles
from orchestrator.prompts import PromptPick
from workers.messages import GroupRequest, WorkerGone

WARM_STEPS = 1


@dataclass
class Waits:
    """How long engines waited for a group that was there."""

    free_since: dict[str, float] = field(default_factory=dict)
    """By engine, when its last group's time was over, whether or not the loop came round to it then; an engine that has
    not sampled yet is not in it."""
    drawn_at: dict[str, float] = field(default_factory=dict)
    """By prompt_uid: from then on the group waits."""
    seconds: list[float] = field(default_factory=list)
    died: int = 0

    def drawn(self, pick: PromptPick) -> None:
        """The group is there."""
        self.drawn_at[pick.prompt_uid] = time.perf_counter()

    def begins(self, engine: str, request: GroupRequest) -> None:
        """An engine has been given a group."""
        free_since = self.free_since.get(engine)
        if free_since is not None:
            self.seconds.append(time.perf_counter() - max(free_since, self.drawn_at[request.prompt_uid]))


@dataclass(frozen=True)
class Faults:
    """Every so many groups, on average, an engine dies over one."""

    every: int
    seed: int

    def kills(self, request: GroupRequest) -> bool:
        """Whether this attempt ends its engine."""
        return random.Random(f"{self.seed}-{request.prompt_uid}-{request.attempt}").randrange(self.every) == 0


Seconds = Callable[[bool], float]
"""What a group takes; told whether it is the engine's first."""


class WatchedEngine(SimEngine):
    """A simulated engine that may die over a group, and says when it begins and ends one."""

    def __init__(self, name: str, seconds: Seconds, faults: Faults, waits: Waits) -> None:
        super().__init__(name, self._time)
        self._seconds = seconds
        self._over = 0.0
        self._faults = faults
        self._waits = waits

    async def generate(self, request: GroupRequest, prompts: object) -> Any:
        """One group. Raises WorkerGone where the engine dies over it."""
        waits = self._waits
        waits.begins(self.name, request)
        answer = await super().generate(request, prompts)
        if self._faults.kills(request):
            waits.died += 1
            waits.free_since.pop(self.name, None)  # a fresh engine has this name next
            raise WorkerGone("killed by the benchmark")
        waits.free_since[self.name] = self._over
        return answer

    def _time(self, request: GroupRequest) -> float:
        seconds = self._seconds(self.name not in self._waits.free_since)
        self._over = time.perf_counter() + seconds
        return seconds


@dataclass(frozen=True)
class Load:
    """What a turn of one size is made of."""

    samples: int
    saturated_groups: int
    """Groups measured in the run whose engines answer at once, at least."""
    paced_groups: int
    """Groups of a step in the run whose engines take their time."""
    paced_steps: int
    """Steps of that run in which latency is measured."""
    groups_per_s: float
    """What all engines of that run finish together."""
    fault_every: int

    def saturated(self, engines: int) -> Shape:
        """A group of every step for each engine; one step is sampled while the one before is trained."""
        measured = -(-self.saturated_groups // engines)
        return Shape(engines, 1, engines, self.samples, 1, WARM_STEPS + measured + 1, restarts=engines)

    def paced(self, engines: int) -> Shape:
        """So many steps open that there is always a group that waits for an engine. Stopped before its last step."""
        staleness = -(-3 * engines // (2 * self.paced_groups))
        steps = WARM_STEPS + self.paced_steps + staleness + 1
        return Shape(engines, 1, self.paced_groups, self.samples, staleness, steps, restarts=engines)


async def simulate(shape: Shape, seconds: Seconds, faults: Faults, stop_at: int) -> tuple[Waits, Clock]:
    """One run, to the end of step `stop_at`; waits are those after the warm-up.

    Raises NotCorrect where a sequence or an engine is not accounted for.
    """
    waits, policy, stop = Waits(), SimPolicy(), asyncio.Event()

    def on_step(step: int) -> None:
        if step == WARM_STEPS:
            waits.seconds.clear()
        if step == stop_at:
            stop.set()

    def engine(name: str) -> LocalWorker:
        return LocalWorker(name, WatchedEngine(name, seconds, faults, waits))

    engines = [engine(f"rollout-{i}") for i in range(shape.engines)]
    stage = replace(Stage.local(shape, policy), engines=engines, spawn=engine)
    simulation = Simulation(shape, stage, Clock(on_step), waits.drawn, stop)
    outcome, pool = await simulation.run()
    check(replace(shape, steps=stop_at), outcome, policy)
    if not waits.died == pool.restarts_used == outcome.ledger["retries"]:
        raise NotCorrect(f"{waits.died} engines died, {pool.restarts_used} restarts, books {outcome.ledger}")
    return waits, simulation.clock


async def scale_turn(engines: int, load: Load, seed: int) -> Turn:
    """Both runs of one size. Raises NotCorrect."""
    faults = Faults(load.fault_every, seed)
    shape = load.saturated(engines)
    meter = Meter([os.getpid()])
    fast, clock = await simulate(shape, lambda first: 0.0, faults, shape.steps)
    _, foreign = meter.read()
    first, last = clock.ticks[WARM_STEPS - 1], clock.ticks[-2]
    sequences = (shape.steps - WARM_STEPS - 1) * shape.sequences
    mean_s = engines / load.groups_per_s
    rng = random.Random(seed)

    def seconds(first: bool) -> float:
        return mean_s * (rng.uniform(0.0, 1.0) if first else rng.uniform(0.5, 1.5))

    paced, _ = await simulate(load.paced(engines), seconds, faults, WARM_STEPS + load.paced_steps)
    p50, p99 = (1e3 * value for value in percentiles(paced.seconds, (50, 99)))
    figures = {
        "p50 dispatch, ms": p50,
        "p99 dispatch, ms": p99,
        "longest dispatch, ms": 1e3 * max(paced.seconds),
        "dispatches": float(len(paced.seconds)),
        "engines that died": float(fast.died + paced.died),
    }
    return Turn(last.wall - first.wall, sequences, last.cpu - first.cpu, foreign, figures=figures)


def name_of(engines: int) -> str:
    """The contender of this size."""
    return f"{engines} engines"


async def measure(sizes: Sequence[int], load: Load, turns: int) -> Report:
    """All sizes by turns; the first is the baseline. Raises NotCorrect."""

    def contender(engines: int) -> Callable[[int], Any]:
        async def take(turn: int) -> Turn:
            return await scale_turn(engines, load, turn)

        return take

    taken = await take_turns({name_of(engines): contender(engines) for engines in sizes}, turns)
    checks = {
        "ledger": "in every run every sequence dispatched was trained or still in flight, none twice, none dropped",
        "engines": "every engine that died was replaced, and its group sampled anew, once",
    }
    arguments = asdict(load) | {"engines": list(sizes), "turns": turns}
    return Report("controller_scale", arguments, taken, name_of(sizes[0]), checks, SEQUENCES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller_scale", description=__doc__)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1000, 4000, 16000], help="the first is the baseline")
    add("--samples", type=int, default=8, help="samples of a prompt")
    add("--saturated-groups", type=int, default=16000, help="groups measured in the first run, at least")
    add("--paced-groups", type=int, default=256, help="groups of a step in the second run")
    add("--paced-steps", type=int, default=4, help="steps measured in the second run")
    add("--load", type=float, default=100.0, help="groups a second that engines finish in the second run")
    add("--fault-every", type=int, default=1000, help="groups over which one engine dies")
    add("--turns", type=int, default=5, help="turns of each size, after a warm-up turn")
    add("--json", type=Path, default=None, help="results file (default: benchmarks/results/)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    given = parse(sys.argv[1:])
    logging.getLogger("orchestrator").setLevel(logging.CRITICAL)  # it reports every engine that dies
    load = Load(
        given.samples,
        given.saturated_groups,
        given.paced_groups,
        given.paced_steps,
        given.load,
        given.fault_every,
    )
    carry_out(lambda: asyncio.run(measure(given.engines, load, given.turns)), given.json)


if __name__ == "__main__":
    main()

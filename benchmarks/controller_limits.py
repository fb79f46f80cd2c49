"""Memory of the controller and delay of its event loop, with up to 100 000 simulated engines full of samples.

    python -m benchmarks.controller_limits --engines 1000 16000
    python -m benchmarks.controller_limits --engines 100000 --slots 1 --turns 1

Every engine samples `--slots` groups at once, 8 groups of 8 samples by default: with 16 000 engines, a million samples
are in flight. The engines together finish `--load` groups per second, some of them die, all are probed and all receive
new weights after every step. Each turn is one run in a fresh process. It measures the memory that the controller adds
to that process, and how late a task of the event loop runs that wants to run every 2 ms: every answer of a
worker waits as long. The simulated workers are in the same process and count.
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
import psutil

from benchmarks.controller_scale import Faults, name_of
from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter, RemoteObject
from benchmarks.support.simulated import Clock, Shape, SimPolicy, SimulatedWorkers, Simulation, check
from tests.fakes import FakeEngine, LocalWorker
from troupe.workers.contract.messages import GroupRequest, WorkerGone

GROUPS = Unit("groups", "group", cpu="us")
MEMORY, PER_SAMPLE, FILL = "GiB of the controller", "bytes per sample in flight", "seconds to open all groups"
P99, LONGEST = "p99 delay of the event loop, ms", "longest delay, ms"
CPU_P99, CPU_LONGEST = "p99 delay, CPU ms", "longest delay, CPU ms"
_EVERY_S = 0.002
_LONGEST_S = 1800.0
_WARM_STEPS = 1


@dataclass(frozen=True)
class Work:
    """A run."""

    engines: int
    slots: int
    """Groups that one engine samples at once; all of them are in flight all the time."""
    samples: int
    """Samples of a group."""
    groups: int
    """Groups of a step."""
    steps: int
    """Steps that are measured, after one step in which the engines fill."""
    groups_per_s: float
    """Groups that all engines finish together."""
    fault_every: int
    """Groups per death of an engine."""
    probe_every_s: float
    """Seconds between two probes of all engines."""

    @property
    def open_groups(self) -> int:
        """Groups in flight."""
        return self.engines * self.slots

    @property
    def shape(self) -> Shape:
        """The run: as many open steps as fill all slots. It is stopped before its last step."""
        staleness = max(1, -(-self.open_groups // self.groups) - 1)
        steps = _WARM_STEPS + self.steps + staleness + 1
        return Shape(
            self.engines,
            self.slots,
            self.groups,
            self.samples,
            staleness,
            steps,
            restarts=self.engines,
            probe_every_s=self.probe_every_s,
            timeout_s=_LONGEST_S,
        )


@dataclass
class Delays:
    """How late a task runs that wants to run every `_EVERY_S`."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of the process in excess of `_EVERY_S`: the part of a delay that is not other processes'."""

    async def watch(self) -> None:
        """Measures until it is cancelled."""
        while True:
            due, used = time.perf_counter() + _EVERY_S, time.process_time()
            await asyncio.sleep(_EVERY_S)
            self.wall_s.append(time.perf_counter() - due)
            self.cpu_s.append(max(0.0, time.process_time() - used - _EVERY_S))

    def clear(self) -> None:
        """Forgets what was measured."""
        self.wall_s.clear()
        self.cpu_s.clear()


class Sampling:
    """How long groups take, and which of them kill their engine."""

    def __init__(self, work: Work, seed: int) -> None:
        self._filling = work.open_groups
        self._mean_s = work.open_groups / work.groups_per_s
        self._faults = Faults(work.fault_every, seed)
        self._random = random.Random(seed)
        self.died = 0
        """Number of engines that died."""

    def seconds(self, request: GroupRequest) -> float:
        """Seconds of a group: groups end evenly from the start. Raises WorkerGone where the group kills the engine."""
        self._filling -= 1
        if self._filling < 0 and self._faults.kills(request):
            self.died += 1
            raise WorkerGone("killed by the benchmark")
        low, high = (0.0, 1.0) if self._filling >= 0 else (0.5, 1.5)
        return self._mean_s * self._random.uniform(low, high)


class LimitsRun:
    """One run, in a process of its own."""

    def __init__(self, work: Work, seed: int) -> None:
        self._work = work
        self._seed = seed

    def run(self) -> Turn:
        """Run it. Raises NotCorrect."""
        logger = logging.getLogger("troupe")
        before = logger.level
        logger.setLevel(logging.CRITICAL)  # the pool logs every death
        try:
            return asyncio.run(self._run())
        finally:
            logger.setLevel(before)

    async def _run(self) -> Turn:
        work, shape, process = self._work, self._work.shape, psutil.Process()
        policy, stop, delays = SimPolicy(), asyncio.Event(), Delays()
        sampling, stop_at = Sampling(work, self._seed), _WARM_STEPS + work.steps
        memory: list[int] = []
        before = process.memory_info().rss

        def on_step(step: int) -> None:
            memory.append(process.memory_info().rss - before)
            if step == _WARM_STEPS:
                delays.clear()
            if step == stop_at:
                watcher.cancel()  # what follows, the cancellation of all groups in flight, delays nobody
                stop.set()

        def engine(name: str) -> LocalWorker[FakeEngine]:
            return LocalWorker(name, FakeEngine(name, sampling.seconds))

        engines = [engine(f"rollout-{number}") for number in range(shape.engines)]
        workers = replace(SimulatedWorkers.local(replace(shape, engines=0), policy), engines=engines, spawn=engine)
        opened = Opened(work.open_groups)
        simulation = Simulation(shape, workers, Clock(on_step), opened.drawn, stop)
        watcher, meter = asyncio.create_task(delays.watch()), Meter()
        began = time.perf_counter()
        outcome, pool = await simulation.run()
        _, foreign = meter.read()
        check(replace(shape, steps=stop_at), outcome, policy)
        if not sampling.died == pool.budget.total <= outcome.ledger["retries"]:
            raise NotCorrect(f"{sampling.died} engines died, but the pool counts {pool.budget.total} restarts")
        ticks = simulation.clock.ticks
        first, last = ticks[_WARM_STEPS - 1], ticks[stop_at - 1]
        p50, p99 = (1e3 * float(value) for value in np.percentile(delays.wall_s, (50, 99)))
        figures = {
            MEMORY: max(memory) / 2**30,
            PER_SAMPLE: max(memory) / (work.open_groups * work.samples),
            FILL: opened.at - began,
            "p50 delay of the event loop, ms": p50,
            P99: p99,
            LONGEST: 1e3 * max(delays.wall_s),
            CPU_P99: 1e3 * float(np.percentile(delays.cpu_s, 99)),
            CPU_LONGEST: 1e3 * max(delays.cpu_s),
            "samples in flight": float(outcome.ledger["in_flight"]),
            "engines that died": float(sampling.died),
        }
        return Turn(last.wall - first.wall, work.steps * work.groups, last.cpu - first.cpu, foreign, figures=figures)


class Opened:
    """Notes when so many groups were opened."""

    def __init__(self, groups: int) -> None:
        self._left = groups
        self.at = 0.0
        """On the clock of `perf_counter`."""

    def drawn(self, _: object) -> None:
        """One more group was opened."""
        self._left -= 1
        if not self._left:
            self.at = time.perf_counter()


async def measure(given: argparse.Namespace) -> Report:
    """Alternate the turns of all sizes; the first is the baseline. Raises NotCorrect."""
    sizes: list[int] = given.engines
    work = Work(
        engines=sizes[0],
        slots=given.slots,
        samples=given.samples,
        groups=given.groups,
        steps=given.steps,
        groups_per_s=given.load,
        fault_every=given.fault_every,
        probe_every_s=given.probe_every,
    )

    def contender(engines: int) -> Callable[[int], Any]:
        async def take(turn: int) -> Turn:
            child = RemoteObject(name_of(engines), LimitsRun, replace(work, engines=engines), turn)
            try:
                return child.call("run", timeout_s=_LONGEST_S)
            finally:
                child.close()

        return take

    taken = await take_turns({name_of(engines): contender(engines) for engines in sizes}, given.turns)
    checks = {
        "ledger": "in every run every sequence dispatched was trained or still in flight, none twice, none dropped",
        "engines": "every engine that died was replaced, and its groups sampled again",
    }
    return Report("controller_limits", taken, name_of(sizes[0]), checks, GROUPS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("controller_limits", __doc__, 3)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1000, 16000], help="numbers of engines; the first is the baseline")
    add("--slots", type=int, default=8, help="groups in each engine (default: 8)")
    add("--samples", type=int, default=8, help="samples of a group (default: 8)")
    add("--groups", type=int, default=2048, help="groups of a step (default: 2048)")
    add("--steps", type=int, default=4, help="measured steps (default: 4)")
    add("--load", type=float, default=500.0, help="groups per second that all engines finish (default: 500)")
    add("--fault-every", type=int, default=1000, help="groups per death of an engine (default: 1000)")
    add("--probe-every", type=float, default=5.0, help="seconds between two probes of all engines (default: 5)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

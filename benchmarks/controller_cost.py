"""CPU time of the driver per sequence, with simulated workers that do nothing.

    python -m benchmarks.controller_cost --groups 128 --samples 8

The product's controller, scheduler, pool, ledger and rollout source run over workers that answer at once: in the same
process, and as Ray actors. The baseline is the cost of the simplest driver on Ray: one `ray.get` of a no-op actor's
call per sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import ray

from benchmarks.support.harness import SEQUENCES, NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter, stopped
from benchmarks.support.simulated import Shape, SimPolicy, SimulatedWorkers, Simulation, check
from tests.fakes import FakeEngine, FakeReward
from troupe.orchestrator.cluster.ray_cluster import ActorWorker, Cluster
from troupe.orchestrator.telemetry.metrics import PeakMemory
from troupe.orchestrator.telemetry.timeline import CallLog

BASELINE = "ray.get per sequence"
WARM_STEPS = 2
"""Steps of a run before the measured ones. The last step is left out as well: it has no next step to prepare."""
ENGINES, SLOTS = 2, 64

WorkersMaker = Callable[[SimPolicy], SimulatedWorkers]


class NoOp:
    """The actor of the baseline."""

    def call(self, sequence: int) -> int:
        """Return the argument, so that answers can be checked."""
        return sequence


async def controller_turn(shape: Shape, make_workers: WorkersMaker) -> Turn:
    """Run once and measure the steps between the warm-up and the last step. Raises NotCorrect."""
    policy = SimPolicy()
    simulation = Simulation(shape, make_workers(policy))
    meter = Meter()
    outcome, _ = await simulation.run()
    _, foreign = meter.read()
    check(shape, outcome, policy)
    first, last = simulation.clock.ticks[WARM_STEPS - 1], simulation.clock.ticks[-2]
    sequences = (shape.steps - WARM_STEPS - 1) * shape.sequences
    return Turn(last.wall - first.wall, sequences, last.cpu - first.cpu, foreign)


def ray_turn(actor: Any, sequences: int) -> Turn:
    """Make one remote call and one `ray.get` per sequence. Raises NotCorrect."""
    meter = Meter()
    began, cpu = time.perf_counter(), time.process_time()
    answers = [ray.get(actor.call.remote(sequence)) for sequence in range(sequences)]
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    _, foreign = meter.read()
    if answers != list(range(sequences)):
        raise NotCorrect("the no-op actor did not return its arguments")
    return Turn(wall_s, sequences, cpu_s, foreign)


def actors(shape: Shape) -> WorkersMaker:
    """Engines and reward worker as Ray actors, called as the product calls them.

    The policy stays in this process, where the batches that it received are checked.
    """

    def actor(name: str, kind: type, *args: Any) -> ActorWorker[Any]:
        actor = ray.remote(kind).options(num_cpus=0, max_concurrency=1000).remote(*args)
        return ActorWorker(name, actor, PeakMemory(), CallLog())

    engines = [actor(f"rollout-{i}", FakeEngine, f"rollout-{i}") for i in range(shape.engines)]
    reward = actor("reward-0", FakeReward)

    def workers(policy: SimPolicy) -> SimulatedWorkers:
        local = SimulatedWorkers.local(shape, policy)
        return replace(local, engines=engines, reward=reward)

    return workers


async def measure(given: argparse.Namespace) -> Report:
    """Start Ray and alternate the turns. Raises NotCorrect."""
    samples, steps = given.samples, given.steps
    shape = Shape(ENGINES, SLOTS, given.groups, samples, staleness=1, steps=steps)
    alone = replace(shape, groups=shape.sequences, samples=1, slots=SLOTS * samples)
    in_process = {
        f"troupe, {samples} samples a prompt": shape,
        "troupe, 1 sample a prompt": alone,
    }
    cluster = Cluster.connect({"CPU": 1.0})
    try:
        over_ray = actors(shape)
        no_op = ray.remote(NoOp).options(num_cpus=0).remote()

        async def baseline(turn: int) -> Turn:
            return await asyncio.to_thread(ray_turn, no_op, shape.sequences * (1 if turn else 4))

        def contender(shape: Shape, make_workers: WorkersMaker, needs_ray: bool) -> Callable[[int], Any]:
            async def take(turn: int) -> Turn:
                # An idle Ray cluster uses about a tenth of a core.
                with nullcontext() if needs_ray else stopped([os.getpid()]):
                    return await controller_turn(shape, make_workers)

            return take

        def local(shape: Shape) -> Callable[[int], Any]:
            return contender(shape, lambda policy: SimulatedWorkers.local(shape, policy), needs_ray=False)

        everyone = {BASELINE: baseline} | {name: local(one) for name, one in in_process.items()}
        everyone[f"troupe over Ray actors, {samples} samples"] = contender(shape, over_ray, needs_ray=True)
        taken = await take_turns(everyone, given.turns)
    finally:
        cluster.abandon()
    checks = {
        "ledger": f"every turn dispatched and trained {steps} x {shape.sequences} sequences, none twice, none dropped",
        "baseline": f"{shape.sequences} answers a turn, each the one asked for",
    }
    return Report("controller_cost", taken, BASELINE, checks, SEQUENCES, asdict(shape))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("controller_cost", __doc__, 7)
    add = parser.add_argument
    add("--groups", type=int, default=128, help="prompts per step")
    add("--samples", type=int, default=8, help="samples per prompt")
    add("--steps", type=int, default=9, help=f"steps per turn; the first {WARM_STEPS} and the last are not measured")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

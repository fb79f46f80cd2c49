"""What the controller costs for every sequence: CPU time of the driver, with stages that do nothing.

    python -m benchmarks.controller_cost --groups 128 --samples 8

The real controller loop, scheduler, pool, ledger and rollout source run over workers in the same process that answer
at once, and over Ray actors that do. The baseline is what the simplest driver on Ray pays: one `ray.get` of a no-op
actor's call for every sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from benchmarks.harness import SEQUENCES, NotCorrect, Report, Turn, carry_out, take_turns
from benchmarks.processes import Meter, stopped
from benchmarks.simulated import Shape, SimEngine, SimPolicy, SimReward, Simulation, Stage, check
from orchestrator.actor_group import ActorWorker, Cluster
from orchestrator.peak_memory import PeakMemory

BASELINE = "ray.get per sequence"
WARM_STEPS = 2
"""Steps of a run before the measured ones; the last one has no next one to prepare, and is left out as well."""
ENGINES, SLOTS = 2, 64

StageMaker = Callable[[SimPolicy], Stage]


class NoOp:
    """The baseline's actor."""

    def call(self, sequence: int) -> int:
        """The argument, so that answers can be checked."""
        return sequence


async def controller_turn(shape: Shape, stage: StageMaker) -> Turn:
    """One run; measured are its steps between the warm-up and the last one. Raises NotCorrect."""
    policy = SimPolicy()
    simulation = Simulation(shape, stage(policy))
    meter = Meter([os.getpid()])
    outcome, _ = await simulation.run()
    _, foreign = meter.read()
    check(shape, outcome, policy)
    first, last = simulation.clock.ticks[WARM_STEPS - 1], simulation.clock.ticks[-2]
    sequences = (shape.steps - WARM_STEPS - 1) * shape.sequences
    return Turn(last.wall - first.wall, sequences, last.cpu - first.cpu, foreign)


def ray_turn(actor: Any, sequences: int) -> Turn:
    """One remote call and one `ray.get` for every sequence. Raises NotCorrect."""
    meter = Meter([os.getpid()])
    began, cpu = time.perf_counter(), time.process_time()
    answers = [ray.get(actor.call.remote(sequence)) for sequence in range(sequences)]
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    _, foreign = meter.read()
    if answers != list(range(sequences)):
        raise NotCorrect("the no-op actor gave other answers than it was asked for")
    return Turn(wall_s, sequences, cpu_s, foreign)


def actors(shape: Shape) -> StageMaker:
    """Engines and reward worker as Ray actors, called as the product calls them; the policy stays here, where what it
    was given is checked."""

    def actor(name: str, kind: type, *args: Any) -> ActorWorker:
        return ActorWorker(name, ray.remote(kind).options(num_cpus=0, max_concurrency=1000).remote(*args), PeakMemory())

    engines = [actor(f"rollout-{i}", SimEngine, f"rollout-{i}") for i in range(shape.engines)]
    reward = actor("reward-0", SimReward)

    def stage(policy: SimPolicy) -> Stage:
        local = Stage.local(shape, policy)
        return replace(local, engines=engines, reward=reward)

    return stage


async def measure(groups: int, samples: int, steps: int, turns: int) -> Report:
    """Start Ray, take turns. Raises NotCorrect."""
    shape = Shape(ENGINES, SLOTS, groups, samples, staleness=1, steps=steps)
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

        def contender(shape: Shape, stage: StageMaker, needs_ray: bool) -> Callable[[int], Any]:
            async def take(turn: int) -> Turn:
                # An idle Ray costs about a tenth of a core.
                with nullcontext() if needs_ray else stopped([os.getpid()]):
                    return await controller_turn(shape, stage)

            return take

        def local(shape: Shape) -> Callable[[int], Any]:
            return contender(shape, lambda policy: Stage.local(shape, policy), needs_ray=False)

        everyone = {BASELINE: baseline} | {name: local(one) for name, one in in_process.items()}
        everyone[f"troupe over Ray actors, {samples} samples"] = contender(shape, over_ray, needs_ray=True)
        taken = await take_turns(everyone, turns)
    finally:
        cluster.abandon()
    checks = {
        "ledger": f"every turn dispatched and trained {steps} x {shape.sequences} sequences, none twice, none dropped",
        "baseline": f"{shape.sequences} answers a turn, each the one asked for",
    }
    return Report("controller_cost", asdict(shape) | {"turns": turns}, taken, BASELINE, checks, SEQUENCES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller_cost", description=__doc__)
    add = parser.add_argument
    add("--groups", type=int, default=128, help="prompts of a step")
    add("--samples", type=int, default=8, help="samples of a prompt")
    add("--steps", type=int, default=9, help=f"steps of a turn; the first {WARM_STEPS} and the last are not measured")
    add("--turns", type=int, default=7, help="turns of each contender, after a warm-up turn")
    add("--json", type=Path, default=None, help="results file (default: benchmarks/results/)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    given = parse(sys.argv[1:])
    carry_out(lambda: asyncio.run(measure(given.groups, given.samples, given.steps, given.turns)), given.json)


if __name__ == "__main__":
    main()

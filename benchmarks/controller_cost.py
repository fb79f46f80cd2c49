"""CPU time of the driver per sequence, by thread and by layer, with workers that do nothing or little.

    python -m benchmarks.controller_cost --groups 128 --engines 16

The product's controller, scheduler, pool, ledger and rollout source run over workers that answer at once in the same
process, and over Ray actors: stub engines that answer at a rate, with tables in the object store, and the product's
reward workers. The baseline is the cost of the simplest driver on Ray: one `ray.get` of a no-op actor's call per
sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from benchmarks.data_plane import rollouts_table
from benchmarks.support.harness import SEQUENCES, NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter, stopped
from benchmarks.support.simulated import Clock, Shape, SimPolicy, SimulatedWorkers, Simulation, check
from benchmarks.support.stub_workers import StubEngine, StubReward
from tests.fakes import RESPONSE_TOKENS, LocalWorker
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.ray_cluster import ActorWorker, Cluster
from troupe.orchestrator.telemetry.metrics import PeakMemory
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.workers.contract import roles
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig

BASELINE = "ray.get per sequence"
WARM_STEPS = 2
"""Steps of a run before the measured ones. The last step is left out as well: it has no next step to prepare."""
ENGINES, SLOTS = 2, 64
OVER_RAY = (1, 8, 16)
"""Samples per prompt of the runs over Ray actors."""

_LAYERS = {
    "calls of Ray": re.compile(r"/ray/(actor|remote_function|util/tracing|_common/signature)|/inspect\.py|submit_"),
    "answers of Ray": re.compile(r"/ray/|ray\._raylet|msgpack|[Pp]ickl"),
    "event loop": re.compile(r"/asyncio/|/selectors\.py|select\.epoll|_contextvars|_asyncio|_socket"),
    "Troupe": re.compile(r"/(orchestrator|workers)/|gc\.collect"),
}
"""Layers by the place of a function or the name of a built-in one; the first that matches."""
_REST = "other layers"
_LEAST_US = 5.0
"""Threads that use less for a group are not reported."""
_START_S = 300.0

WorkersMaker = Callable[[SimPolicy], SimulatedWorkers]


class NoOp:
    """The actor of the baseline."""

    def call(self, sequence: int) -> int:
        """Return the argument, so that answers can be checked."""
        return sequence


def _no_spawn(name: str) -> ActorWorker[Any]:
    raise NotCorrect(f"{name} died")


def thread_seconds() -> dict[str, float]:
    """CPU seconds of this process so far, by the name of the thread without its number; the main thread's is
    `main thread`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        name = "main thread" if task.name == str(os.getpid()) else (task / "comm").read_text().strip(" \n0123456789_-.")
        seconds[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def layer_shares(profile: cProfile.Profile) -> dict[str, float]:
    """Share of each layer in the profiled time."""
    seconds = dict.fromkeys((*_LAYERS, _REST), 0.0)
    for (path, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = f"{path}:{name}"
        seconds[next((layer for layer, pattern in _LAYERS.items() if pattern.search(place)), _REST)] += own
    return {layer: own / sum(seconds.values()) for layer, own in seconds.items()}


async def controller_turn(
    shape: Shape, make_workers: WorkersMaker, on_step: Callable[[int], None] | None = None
) -> Turn:
    """Run once and measure the steps between the warm-up and the last step. Raises NotCorrect."""
    policy = SimPolicy()
    simulation = Simulation(shape, make_workers(policy), Clock(on_step))
    meter = Meter()
    outcome, _ = await simulation.run()
    _, foreign = meter.read()
    check(shape, outcome, policy)
    first, last = simulation.clock.ticks[WARM_STEPS - 1], simulation.clock.ticks[-2]
    sequences = (shape.steps - WARM_STEPS - 1) * shape.sequences
    return Turn(last.wall - first.wall, sequences, last.cpu - first.cpu, foreign)


async def layered_turn(shape: Shape, make_workers: WorkersMaker) -> Turn:
    """Run twice: for the CPU time of the threads, and with a profile of the main thread for its layers."""
    profile, threads = cProfile.Profile(time.thread_time), [thread_seconds()]

    def read_threads(step: int) -> None:
        if step in (WARM_STEPS, shape.steps - 1):
            threads.append(thread_seconds())

    def switch_profile(step: int) -> None:
        if step == WARM_STEPS:
            profile.enable()
        elif step == shape.steps - 1:
            profile.disable()

    turn = await controller_turn(shape, make_workers, read_threads)
    await controller_turn(shape, make_workers, switch_profile)
    *_, first, last = threads
    groups = turn.amount / shape.samples
    by_thread = {name: 1e6 * (last[name] - first[name]) / groups for name in last}
    figures = {f"{name}, us a group": used for name, used in sorted(by_thread.items()) if used >= _LEAST_US}
    main = by_thread["main thread"]
    layers = layer_shares(profile)
    figures |= {f"main thread in {name}, us a group": main * layers[name] for name in (*_LAYERS, _REST)}
    return replace(turn, figures=figures)


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


async def actors(engine_count: int, reward_count: int, seconds: float) -> WorkersMaker:
    """Stub engines and the product's reward workers as Ray actors, called as the product calls them.

    The policy stays in this process, where the batches that it received are checked.
    """

    def actor(name: str, kind: type, calls: int, *args: Any) -> ActorWorker[Any]:
        handle = ray.remote(kind).options(num_cpus=0, max_concurrency=calls).remote(*args)
        return ActorWorker(name, handle, PeakMemory(), CallLog())

    names = [f"rollout-{number}" for number in range(engine_count)]
    tables = ray.put({size: rollouts_table(size, RESPONSE_TOKENS, seed=17) for size in OVER_RAY})
    engines = [actor(name, StubEngine, 1000, name, seconds, tables) for name in names]
    config = RewardConfig(functions=(RewardFunctionConfig(name="exact_match"),))
    rewards = [actor(f"reward-{n}", StubReward, 1, config, f"reward-{n}") for n in range(reward_count)]
    await gather_all(worker.call(roles.Replica.start, _START_S) for worker in (*engines, *rewards))

    def workers(policy: SimPolicy) -> SimulatedWorkers:
        return SimulatedWorkers(engines, LocalWorker("policy-0", policy), rewards, _no_spawn)

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
        over_ray = await actors(given.engines, given.rewards, given.seconds)
        no_op = ray.remote(NoOp).options(num_cpus=0).remote()

        async def baseline(turn: int) -> Turn:
            return await asyncio.to_thread(ray_turn, no_op, shape.sequences * (1 if turn else 4))

        def local(shape: Shape) -> Callable[[int], Any]:
            async def take(turn: int) -> Turn:
                with stopped([os.getpid()]):  # an idle Ray cluster uses about a tenth of a core
                    return await controller_turn(shape, lambda policy: SimulatedWorkers.local(shape, policy))

            return take

        def remote(shape: Shape) -> Callable[[int], Any]:
            async def take(turn: int) -> Turn:
                return await layered_turn(shape, over_ray)

            return take

        everyone = {BASELINE: baseline} | {name: local(one) for name, one in in_process.items()}
        for size in OVER_RAY:
            name = f"troupe over Ray, {size} sample{'s' * (size > 1)} a prompt"
            everyone[name] = remote(replace(shape, engines=given.engines, samples=size))
        taken = await take_turns(everyone, given.turns)
    finally:
        cluster.abandon()
    checks = {
        "ledger": f"every turn dispatched and trained {steps} x {shape.groups} groups, none twice, none dropped",
        "baseline": f"{shape.sequences} answers a turn, each the one asked for",
    }
    return Report("controller_cost", taken, BASELINE, checks, SEQUENCES, asdict(shape))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("controller_cost", __doc__, 7)
    add = parser.add_argument
    add("--groups", type=int, default=128, help="prompts per step")
    add("--samples", type=int, default=8, help="samples per prompt, in this process")
    add("--steps", type=int, default=9, help=f"steps per turn; the first {WARM_STEPS} and the last are not measured")
    add("--engines", type=int, default=16, help="engines over Ray, a process each (about 0.15 GiB)")
    add("--rewards", type=int, default=2, help="reward workers over Ray")
    add("--seconds", type=float, default=0.1, help="seconds of a group in an engine over Ray")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

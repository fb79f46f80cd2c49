"""Small turns of controller_cost, and what a group costs the driver."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from types import FrameType

from benchmarks.controller_cost import WARM_STEPS, controller_turn, layered_turn
from benchmarks.data_plane import rollouts_table
from benchmarks.support.simulated import Shape, SimPolicy, SimulatedWorkers, Simulation
from benchmarks.support.stub_workers import StubEngine, StubReward
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig

SHAPE = Shape(engines=3, slots=2, groups=6, samples=4, staleness=1, steps=5)


async def test_a_run_over_stages_without_work_trains_every_sequence() -> None:
    turn = await controller_turn(SHAPE, lambda policy: SimulatedWorkers.local(SHAPE, policy))
    assert turn.amount == (SHAPE.steps - WARM_STEPS - 1) * 24
    assert turn.wall_s > 0 and turn.cpu_s > 0


async def test_the_layers_of_the_main_thread_add_up_to_its_time() -> None:
    turn = await layered_turn(SHAPE, lambda policy: SimulatedWorkers.local(SHAPE, policy))
    main = turn.figures["main thread, us a group"]
    layers = {name: us for name, us in turn.figures.items() if name.startswith("main thread in ")}
    assert abs(sum(layers.values()) - main) < 0.01 * main
    own, ray = layers["main thread in Troupe, us a group"], layers["main thread in calls of Ray, us a group"]
    assert own > ray == 0.0, "these workers are no actors"


async def test_a_stub_engine_makes_the_table_of_its_group() -> None:
    engine = StubEngine("rollout-0", 0.0, {4: rollouts_table(4, 8, seed=17)})
    summary, table = await engine.generate(GroupRequest("p7", 3, 2, 4, 17), None)
    reward = StubReward(RewardConfig(functions=(RewardFunctionConfig(name="exact_match"),)), "reward-0")
    try:
        scored, _ = reward.score(table)
    finally:
        reward.close()
    assert (scored.prompt_uid, scored.attempt, scored.statuses) == ("p7", 2, ("ok",) * len(summary.samples))


def python_calls(steps: int) -> int:
    """Calls of Python functions in a run whose engines and reward worker do nothing."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    shape = replace(SHAPE, engines=2, slots=64, groups=64, samples=8, steps=steps)
    simulation = Simulation(shape, SimulatedWorkers.local(shape, SimPolicy()))

    async def run() -> None:
        sys.setprofile(count)
        try:
            await simulation.run()
        finally:
            sys.setprofile(None)

    asyncio.run(run())
    return calls


def test_a_group_costs_the_driver_few_python_calls() -> None:
    """Calls are the same on every machine, unlike times. The bound is a tenth more than there are with Python 3.11."""
    python_calls(2)  # what only a first run imports and caches
    assert (python_calls(6) - python_calls(3)) / (3 * 64) < 285

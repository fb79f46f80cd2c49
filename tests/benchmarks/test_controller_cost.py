"""A small turn of controller_cost."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from types import FrameType

from benchmarks.controller_cost import WARM_STEPS, controller_turn
from benchmarks.support.simulated import Shape, SimPolicy, SimulatedWorkers, Simulation

SHAPE = Shape(engines=3, slots=2, groups=6, samples=4, staleness=1, steps=5)


async def test_a_run_over_stages_without_work_trains_every_sequence() -> None:
    turn = await controller_turn(SHAPE, lambda policy: SimulatedWorkers.local(SHAPE, policy))
    assert turn.amount == (SHAPE.steps - WARM_STEPS - 1) * 24
    assert turn.wall_s > 0 and turn.cpu_s > 0


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

"""A small turn of controller_cost."""

from __future__ import annotations

from benchmarks.controller_cost import WARM_STEPS, controller_turn
from benchmarks.support.simulated import Shape, SimulatedWorkers

SHAPE = Shape(engines=3, slots=2, groups=6, samples=4, staleness=1, steps=5)


async def test_a_run_over_stages_without_work_trains_every_sequence() -> None:
    turn = await controller_turn(SHAPE, lambda policy: SimulatedWorkers.local(SHAPE, policy))
    assert turn.amount == (SHAPE.steps - WARM_STEPS - 1) * 24
    assert turn.wall_s > 0 and turn.cpu_s > 0

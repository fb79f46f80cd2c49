"""Times, bounds and a small turn of pipeline_bubble."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pipeline_bubble import LONGEST, Times, measured_steps, pipeline_turn, row_of, stages_s
from benchmarks.support.simulated import Shape
from tests.clock import on_virtual_time

SHAPE = Shape(engines=3, slots=2, groups=6, samples=4, staleness=1, steps=5)


def test_times_are_the_prompts_own_and_have_a_long_tail() -> None:
    times = Times(0.1, 0.15, 3)
    drawn = [times.of(row) for row in range(4000)]
    assert drawn[:5] == [times.of(row) for row in range(5)] != [Times(0.1, 0.15, 4).of(row) for row in range(5)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.1, rel=0.1)
    assert max(drawn) == pytest.approx(0.1 * LONGEST) and min(drawn) < 0.02


def test_the_bound_counts_slots_and_steady_steps() -> None:
    times = Times(0.1, 0.15, 3)
    generate_s, train_s = stages_s(SHAPE, times, [[1, 2], [3]])
    assert generate_s == pytest.approx((times.of(1) + times.of(2) + times.of(3)) / 6)
    assert train_s == pytest.approx(0.3)
    assert list(measured_steps(replace(SHAPE, staleness=1, steps=9))) == [2, 3, 4, 5, 6]
    assert row_of("e12-r345") == 345


def test_a_slow_engine_counts_for_as_much_as_it_samples() -> None:
    times = Times(0.1, 0.15, 3, slow=1, factor=4.0)
    assert [times.factor_of(engine) for engine in range(3)] == [4.0, 1.0, 1.0]
    generate_s, _ = stages_s(SHAPE, times, [[1, 2], [3]])
    assert generate_s == pytest.approx((times.of(1) + times.of(2) + times.of(3)) / (2 * 2.25))


def test_a_step_waits_for_a_slow_engine() -> None:
    shape = replace(SHAPE, engines=8, groups=16, staleness=0, steps=10)
    steps = [
        on_virtual_time(pipeline_turn(shape, Times(1.0, 0.5, 3, slow, factor=4.0))).figures["step, s"]
        for slow in (0, 1)
    ]
    assert steps[1] > 1.5 * steps[0]  # the smaller capacity alone: 1.1 times


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_pipeline_of_waiting_stages_does_not_beat_its_bound_by_more_than_its_edges(staleness: int) -> None:
    shape = replace(SHAPE, staleness=staleness, steps=10)
    turn = await pipeline_turn(shape, Times(0.004, 0.004, 3))
    assert turn.wall_s > 0 and 0.0 < turn.rate < 1.5
    steps = len(measured_steps(shape))
    figures = turn.figures
    assert turn.amount == pytest.approx(steps * max(figures["R of a step, s"], figures["T of a step, s"]))
    assert turn.wall_s == pytest.approx(steps * figures["step, s"])

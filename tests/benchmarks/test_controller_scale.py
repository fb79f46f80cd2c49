"""Small turns of controller_scale: deaths and dispatch latency."""

from __future__ import annotations

from benchmarks.controller_scale import Load, Waits, scale_turn
from troupe.orchestrator.data.prompts import PromptPick
from troupe.workers.contract.messages import GroupRequest


async def test_dead_engines_are_replaced_and_counted() -> None:
    load = Load(2, saturated_groups=60, paced_groups=10, paced_steps=3, groups_per_s=2000.0, fault_every=8)
    turn = await scale_turn(20, load, seed=1)
    assert turn.amount == 60 * 2 and turn.figures["engines that died"] > 3
    assert turn.figures["dispatches"] > 0 and turn.figures["p50 dispatch, ms"] <= turn.figures["p99 dispatch, ms"]


def test_an_engine_waits_for_a_group_that_is_there() -> None:
    waits = Waits()
    waits.drawn(PromptPick("a", 0))
    request = GroupRequest("a", 0, 0, 1, 1)
    waits.begins("new", request)
    assert waits.seconds == []  # its first group: the fill is not measured
    drawn = waits.drawn_at["a"]
    waits.free_since |= {"early": drawn - 100.0, "late": drawn + 0.0}
    waits.begins("early", request)
    waits.begins("late", request)
    assert 0.0 <= waits.seconds[0] <= waits.seconds[1] < 100.0

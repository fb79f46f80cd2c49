"""Ranks without Ray, and the turn that a meter makes."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

import pytest

from benchmarks.support.harness import NotCorrect
from benchmarks.support.processes import Meter
from benchmarks.support.ranks import Ranks


def meet(rank: int, meeting: Queue[Any], count: int, fails: int) -> int:
    """The first rank says a number to all; each returns it and its own."""
    if rank == 0:
        for _ in range(count):
            meeting.put(40)
    if rank == fails:
        raise ValueError("as planned")
    return meeting.get(timeout=60) + rank


def test_ranks_meet_and_answer() -> None:
    with Ranks(2, meet, 2, -1) as ranks:
        meter = Meter(ranks.pids)
        assert sorted(ranks.results(60.0)) == [40, 41]
        assert meter.turn(1.0).cpu_s > 0.0, "they are still there"
    assert len(ranks.pids) == 2


def test_the_error_of_a_rank_is_that_of_all() -> None:
    with Ranks(2, meet, 2, 1) as ranks, pytest.raises(NotCorrect, match="ValueError: as planned"):
        ranks.results(60.0)


def test_a_meter_makes_a_turn_of_all_seconds_or_of_those_that_count() -> None:
    meter = Meter()
    turn = meter.turn(3.0, figures={"MB": 1.0})
    assert (turn.amount, turn.figures, turn.phases) == (3.0, {"MB": 1.0}, {})
    assert turn.wall_s > 0 and turn.foreign_cores >= 0
    assert meter.turn(3.0, 2.5, {"load": 2.0}).wall_s == 2.5

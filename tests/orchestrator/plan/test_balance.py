"""The closed form of a step against the controller's own loop over simulated engines, on virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline_bubble import STALENESS, Times, pipeline_turn
from benchmarks.support.simulated import Shape
from tests.clock import on_virtual_time
from troupe.orchestrator.plan.balance import Stages, divisions

GROUPS = 16
WITHIN = 0.13
"""Of a step's seconds: what waits for stragglers of earlier batches adds to the closed form."""


@dataclass(frozen=True)
class Spread(Times):
    """Times of groups that differ from their mean by up to a share of it."""

    share: float = 0.5

    def of(self, row: int) -> float:
        return self.mean_s * random.Random(f"{self.seed}-{row}").uniform(1 - self.share, 1 + self.share)


@lru_cache
def simulated(at_once: int, times: Times, limit: int) -> tuple[float, float]:
    """(seconds of a step, mean staleness) of the product's loop; sampling takes a second if it never pauses."""
    shape = Shape(at_once // 4, 4, GROUPS, 1, limit, 24 + 2 * limit, probe_every_s=1e6, timeout_s=1e6)
    figures = on_virtual_time(pipeline_turn(shape, times)).figures
    return figures["step, s"], figures[STALENESS]


def stages(at_once: int, times: Times) -> Stages:
    """The stages alone. How long a batch drains is measured in turn."""
    drain = simulated(at_once, times, 0)[0] - times.train_s
    return Stages(1.0, times.train_s, group_s=times.mean_s, drain=drain)


@pytest.mark.parametrize(
    ("at_once", "train_s", "limit", "step_s"),
    [(16, 0.5, 2, 1.0), (4, 2.0, 2, 2.0), (32, 0.5, 1, (2.0 + 0.5) / 2), (8, 0.9, 0, 1.9)],
)
def test_a_step_of_equal_groups_is_the_longer_stage_or_a_share_of_both(
    at_once: int, train_s: float, limit: int, step_s: float
) -> None:
    times = Spread(at_once / GROUPS, train_s, 3, share=0.0)
    alone = Stages(1.0, train_s, group_s=times.mean_s, drain=max(1.0, times.mean_s))
    assert alone.step_s(limit) == pytest.approx(step_s)
    assert simulated(at_once, times, limit)[0] == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("at_once", "train_s", "limit", "older"),
    [(4, 0.5, 1, 0.75), (8, 0.9, 2, 1.4), (8, 2.0, 2, 2.0), (16, 0.5, 2, 1.5), (32, 0.9, 1, 1.0), (32, 0.9, 4, 2.9)],
)
def test_the_closed_form_is_that_of_the_loop(at_once: int, train_s: float, limit: int, older: float) -> None:
    times = Spread(at_once / GROUPS, train_s, 3)
    alone, (step_s, staleness) = stages(at_once, times), simulated(at_once, times, limit)
    assert alone.step_s(limit) == pytest.approx(step_s, rel=WITHIN)
    assert alone.mean_staleness(limit) == pytest.approx(older)
    assert staleness == pytest.approx(older, abs=0.1)
    waits = 1 - 1 / step_s, 1 - train_s / step_s
    assert alone.waits(limit) == pytest.approx(waits, abs=WITHIN)


@pytest.mark.parametrize(("at_once", "train_s", "limit"), [(8, 0.9, 1), (16, 0.5, 2), (32, 0.9, 1)])
def test_no_step_of_long_tailed_groups_is_shorter(at_once: int, train_s: float, limit: int) -> None:
    times = Times(at_once / GROUPS, train_s, 3)
    form, step_s = stages(at_once, times).step_s(limit), simulated(at_once, times, limit)[0]
    assert form > 1.1 and form == pytest.approx(step_s, rel=WITHIN) and form < 1.01 * step_s


def test_transfers_and_other_trainers_count_on_both_sides() -> None:
    alone = Stages(4.0, 2.0, transfer_s=1.0, group_s=1.0, drain=1.5, others_s=3.0)
    assert [alone.step_s(limit) for limit in (0, 1, 2)] == [6 + 3 + 1, 5.0, 5.0]
    assert alone.waits(0) == pytest.approx((1 - 7 / 10, 1 - 3 / 10))
    assert alone.waits(1) == pytest.approx((0.0, 1 - 3 / 5))
    assert [alone.mean_staleness(limit) for limit in (0, 1, 4)] == [0.0, 1.0, 1.0]  # (1 + 3 + 1) / 5


@settings(deadline=None, derandomize=True)
@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.integers(2, 128), st.integers(0, 1))
def test_the_best_division_is_next_to_the_closed_form(sampling: float, training: float, gpus: int, limit: int) -> None:
    best, *others = divisions(Stages(sampling, training / (gpus - 1)), (1, gpus - 1), (1, 1), limit)
    roots = (sampling, training) if limit else (math.sqrt(sampling), math.sqrt(training))
    exact = gpus * roots[0] / sum(roots)
    assert abs(best.sampling - min(max(exact, 1), gpus - 1)) < 1 and best.training == gpus - best.sampling
    assert len(others) == gpus - 2 and all(one.step_s >= best.step_s for one in others)


def test_divisions_keep_engines_and_groups_of_trainers_whole() -> None:
    found = divisions(Stages(100.0 / 16, 300.0 / 16), (16, 16), (8, 4), 1)
    assert [one.sampling for one in found] == [8, 16, 24]
    assert found[0].step_s == pytest.approx(300 / 24)

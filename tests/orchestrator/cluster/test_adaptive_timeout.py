"""Bounds that follow how long calls have taken."""

from __future__ import annotations

import pytest

from tests.clock import Clock
from troupe.orchestrator.cluster.adaptive_timeout import AdaptiveTimeouts
from troupe.orchestrator.errors import WorkerTimeout


def call(
    of: AdaptiveTimeouts, clock: Clock, seconds: float, method: str = "update", timeout_s: float = 1800.0
) -> float:
    """Make a call that takes so long; its bound."""
    with of.bounded(method, timeout_s) as bound:
        clock.now += seconds
    return bound


def test_the_first_calls_of_a_method_have_the_bound_of_the_spec() -> None:
    clock = Clock()
    of = AdaptiveTimeouts(120.0, clock)
    assert [call(of, clock, 2.0) for _ in range(6)] == [1800.0] * 5 + [120.0]
    assert call(of, clock, 2.0, "score") == 1800.0


@pytest.mark.parametrize(("longest", "bound"), [(2.0, 120.0), (30.0, 300.0), (600.0, 1800.0)])
def test_a_call_may_take_ten_times_the_longest_but_never_more_than_the_spec_allows(
    longest: float, bound: float
) -> None:
    clock = Clock()
    of = AdaptiveTimeouts(120.0, clock)
    for seconds in (1.0, longest, 1.0, 1.0, 1.0):
        call(of, clock, seconds)
    assert call(of, clock, 1.0) == bound


def test_after_a_hung_call_the_next_one_may_take_longer() -> None:
    clock = Clock()
    of = AdaptiveTimeouts(120.0, clock)
    for _ in range(5):
        call(of, clock, 2.0)
    reason = r"no answer in 120 s: 10 times .* was 20 s \(failures.hung_s\)"
    with pytest.raises(WorkerTimeout, match=reason), of.bounded("update", 1800.0) as bound:
        raise WorkerTimeout("policy-1", "update", f"no answer in {bound:g} s")
    assert call(of, clock, 2.0) == 1200.0


def test_a_call_that_waits_for_others_may_take_as_long_as_all_of_them() -> None:
    clock = Clock()
    of = AdaptiveTimeouts(120.0, clock)
    for _ in range(5):
        call(of, clock, 2.0)
        call(of, clock, 20.0, "records")
    with of.bounded("records", 1800.0):
        assert call(of, clock, 50.0) == 120.0 + 200.0
        with of.bounded("update", 1800.0) as bound:
            assert bound == 500.0 + 200.0, "the wait is measured"
            assert call(of, clock, 1.0) == 500.0 + 500.0 + 200.0
    assert call(of, clock, 2.0, "score") == 1800.0
    with of.bounded("score", 1800.0):
        assert call(of, clock, 900.0) == 1800.0, "it waits for a call of which too little is known"
    assert call(of, clock, 2.0) == 500.0


def test_a_call_that_waits_for_one_without_a_bound_is_neither_bounded_nor_measured() -> None:
    clock = Clock()
    of = AdaptiveTimeouts(120.0, clock)
    for _ in range(5):
        call(of, clock, 2.0)
    with of.occupied():  # a checkpoint, say
        assert call(of, clock, 500.0, "update") == 1800.0
    assert call(of, clock, 2.0, "update") == 120.0


def test_the_bound_of_the_spec_keeps_its_own_message() -> None:
    with (
        pytest.raises(WorkerTimeout, match=r"no answer in 5 s$"),
        AdaptiveTimeouts(120.0).bounded("update", 5.0) as bound,
    ):
        raise WorkerTimeout("policy-1", "update", f"no answer in {bound:g} s")

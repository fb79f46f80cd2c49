"""Timers, aggregation, and the files that record a run's metrics."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.orchestrator.telemetry.metrics import (
    PeakMemory,
    PhaseTimers,
    best_of_k,
    merge_update_metrics,
    merge_updates,
    pass_at_k,
    std,
)
from troupe.workers.contract.messages import Peak, ScoredGroups, ScoreSummary, UpdateMetrics, WeightAck, WorkerHealth
from troupe.workers.contract.units import GIB
from troupe.workers.telemetry.peak_memory import resident_peak


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_timers_sum_by_phase_and_count_overlaps_in_each() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    for _ in range(2):
        with timers.phase("generate"):
            clock.now += 3
            with timers.phase("score"):
                clock.now += 1
    clock.now += 2
    assert timers.seconds() == {"generate": 8.0, "score": 2.0}
    assert timers.total() == 10.0
    assert timers.shares() == {"generate": 0.8, "score": 0.2}


def test_a_phase_that_raises_is_counted() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    with pytest.raises(KeyError), timers.phase("update"):
        clock.now += 4
        raise KeyError
    assert timers.seconds() == {"update": 4.0}


def test_without_elapsed_time_there_are_no_shares() -> None:
    assert PhaseTimers(Clock()).shares() == {}


def test_the_population_standard_deviation() -> None:
    assert std([1.0, 2.0, 3.0, 10.0]) == pytest.approx(math.sqrt((9 + 4 + 1 + 36) / 4))
    assert math.isnan(std([]))


def update(loss: float, norm: float, skipped: bool = False, **values: float) -> UpdateMetrics:
    return UpdateMetrics({"loss": loss, "tokens": 8.0}, {"grad_norm": norm, **values}, skipped)


def test_sums_add_over_ranks_and_values_are_taken_once() -> None:
    assert merge_update_metrics([update(0.25, 3.0), update(0.5, 3.0)]) == {
        "loss": 0.75,
        "tokens": 16.0,
        "grad_norm": 3.0,
    }


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_values_that_are_not_finite_can_be_equal(norm: float) -> None:
    merged = merge_update_metrics([update(1.0, norm, skipped=True), update(1.0, norm, skipped=True)])
    assert merged["grad_norm"] == pytest.approx(norm, nan_ok=True)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "at least one rank"),
        ([update(1.0, 3.0), update(1.0, 3.1)], "ranks 0 and 1 disagree on grad_norm: 3.0 and 3.1"),
        ([update(1.0, 3.0), update(1.0, math.nan)], "disagree on grad_norm"),
        ([update(1.0, 3.0), update(1.0, 3.0, skipped=True)], "disagree on whether the update was skipped"),
        ([update(1.0, 3.0), update(1.0, 3.0, rate=1.0)], "disagree on .* what to report"),
        ([UpdateMetrics({"loss": 1.0}, {"loss": 1.0})], "loss is both a sum and a value"),
    ],
)
def test_ranks_that_disagree_are_an_error(ranks: list[UpdateMetrics], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_update_metrics(ranks)


def test_a_step_reports_the_largest_of_its_updates_where_the_metric_is_a_largest_value() -> None:
    """The mean of 1, 1, 1 and 30 would be below the bound that the algorithms' pages name."""
    updates = [{"policy/ratio_max": ratio, "policy/kl_ref": ratio} for ratio in (1.0, 30.0, 1.0, 1.0)]
    assert merge_updates([*updates, {"policy/nll": 2.0}]) == {
        "policy/ratio_max": 30.0,
        "policy/kl_ref": 8.25,
        "policy/nll": 2.0,
    }
    assert math.isnan(merge_updates([{"critic/value_abs_max": 1.0}, {"critic/value_abs_max": math.nan}]).popitem()[1])


@pytest.mark.parametrize("lost", [math.inf, math.nan])
def test_a_skipped_update_hides_no_gradient_norm(lost: float) -> None:
    norms = [{"policy/grad_norm": norm, "policy/loss": norm} for norm in (1.0, lost, 3.0)]
    merged = merge_updates(norms)
    assert merged["policy/grad_norm"] == 2.0
    assert not math.isfinite(merged["policy/loss"]), "a loss that is lost shows"
    assert not math.isfinite(merge_updates(norms[1:2])["policy/grad_norm"])


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_sample(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    subsets = itertools.combinations([index < correct for index in range(samples)], k)
    assert pass_at_k(samples, correct, k) == pytest.approx(fmean(any(subset) for subset in subsets))


@given(
    st.lists(st.floats(-9.0, 9.0), min_size=1, max_size=8).flatmap(
        lambda r: st.tuples(st.just(r), st.integers(1, len(r)))
    )
)
def test_best_of_k_is_the_mean_over_subsets_of_their_largest_reward(case: tuple[list[float], int]) -> None:
    rewards, k = case
    assert best_of_k(rewards, k) == pytest.approx(fmean(map(max, itertools.combinations(rewards, k))), abs=1e-12)


def test_best_of_k_of_many_samples_is_finite_and_refuses_more_than_there_are() -> None:
    assert best_of_k([0.5] * 4000, 2000) == pytest.approx(0.5)
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"best@{k}"):
            best_of_k([1.0, 2.0], k)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(samples, correct, k)


# Files


HELD = 64 << 20
SLACK = 4 << 20
"""The kernel counts resident pages of running threads with a delay."""
HOLD = f"""
held = bytearray({HELD})
held[::4096] = bytes([1]) * len(held[::4096])
del held
print("held", flush=True)
input()
"""


def test_the_peak_remains_after_memory_is_freed() -> None:
    held = bytearray(HELD)
    held[::4096] = bytes([1]) * len(held[::4096])
    grown = resident_peak()
    del held
    assert grown > HELD
    assert resident_peak() >= grown - SLACK


def test_other_processes_count_with_their_peak_and_ended_ones_not_at_all() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert resident_peak([child.pid]) - resident_peak() > HELD - SLACK
        child.stdin.write(b"\n")
    assert resident_peak([child.pid]) - resident_peak() < SLACK


def test_reported_memory_does_not_affect_equality() -> None:
    assert ScoreSummary(3, peak=Peak(1)) == ScoreSummary(3)
    assert WorkerHealth("a", "host", 1, 2, 0, peak=Peak(1)) == WorkerHealth("a", "host", 1, 2, 0)


def test_the_largest_worker_of_a_role_keeps_its_peak() -> None:
    peaks = PeakMemory()
    peaks.note("rollout-0", WeightAck("rollout-0", 1, "d", 0.1, peak=Peak(3 * GIB, GIB)))
    peaks.note("rollout-1", WeightAck("rollout-1", 1, "d", 0.1, peak=Peak(2 * GIB, 4 * GIB)))
    peaks.note("reward-0", ScoredGroups((), peak=Peak(GIB)))
    peaks.note("reward-0", ScoredGroups((), peak=Peak(GIB // 2)))
    peaks.note("reference-0", (3, None))
    peaks.note("policy-0", UpdateMetrics({}, {}))
    metrics = peaks.metrics()
    assert metrics.pop("memory/driver") == pytest.approx(resident_peak() / GIB, rel=0.1)
    assert metrics == {"memory/reward": 1.0, "memory/rollout": 3.0, "memory/rollout_gpu": 4.0}
    assert peaks.summary().startswith("reward 1.00, rollout 3.00, driver ")
    assert peaks.summary().endswith(", rollout_gpu 4.00 GiB")

"""What a sweep shows: values, intervals, the best setting, the frontier, and which trials end early."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from troupe.orchestrator.insight.sweep.halving import Halving
from troupe.orchestrator.insight.sweep.results import (
    SettingResult,
    Status,
    TrialResult,
    best_of,
    default_metric,
    frontier,
    metric_value,
    sentence,
)


def setting(label: str, *values: float | None, status: Status = "complete", **of: Any) -> SettingResult:
    trials = (
        TrialResult(f"{label}-{i}", i, "", status if value is None else "complete", value=value, **of)
        for i, value in enumerate(values)
    )
    return SettingResult(label, {}, tuple(trials))


def test_a_value_is_the_last_evaluation_or_the_mean_of_the_last_third() -> None:
    lines = [{"step": step, "reward/mean": float(step), "eval/reward": 10.0 * step} for step in range(1, 10)]
    assert metric_value("reward/mean", lines) == 8.0
    assert metric_value("eval/reward", lines) == 90.0
    assert metric_value("reward/mean", [*lines, {"step": 10, "reward/mean": math.nan}]) == 8.0
    assert metric_value("reward/mean", [{"step": 1, "reward/mean": None}]) is None


def test_the_metric_is_one_that_all_runs_have() -> None:
    evaluated, plain = [{"eval/accuracy": 1.0, "reward/mean": 0.0}], [{"reward/mean": 0.0}]
    assert default_metric([evaluated, evaluated]) == "eval/accuracy"
    assert default_metric([evaluated, plain]) == "reward/mean"
    assert default_metric([]) is None


def test_an_interval_is_student_s() -> None:
    """Mean 2, standard deviation 1, three seeds: 2 +- 4.3027 / sqrt(3)."""
    estimate = setting("a", 1.0, 2.0, 3.0).estimate
    assert estimate is not None and estimate.low is not None
    assert estimate.value == 2.0 and estimate.low == pytest.approx(2 - 4.3027 / math.sqrt(3))


def test_the_best_setting_and_those_that_cannot_be_told_from_it() -> None:
    high, near, low = setting("high", 0.9, 0.92), setting("near", 0.6, 0.9), setting("low", 0.1, 0.11)
    best = best_of([low, near, high], 1.0)
    assert best == [high, near]
    said = sentence(best, "eval/accuracy")
    assert said.startswith("best: high: eval/accuracy 0.91 (0.78")
    assert said.endswith("over 2 seeds); not separable from near")
    assert best_of([low, near, high], -1.0) == [low, near]
    assert sentence(best_of([high, low], 1.0), "x").endswith("95% interval over 2 seeds)")


def test_without_several_different_values_nothing_is_separable() -> None:
    one, other = setting("a", 0.9), setting("b", 0.1)
    assert best_of([one, other], 1.0) == [one, other]
    assert sentence([one, other], "m") == "best: a: m 0.9, without an interval; not separable from b"
    equal = setting("a", 0.9, 0.9)
    assert best_of([equal, other], 1.0) == [equal, other], "equal values have no interval"


def test_settings_with_equal_results_say_that_their_values_changed_nothing() -> None:
    """Equal values of the metric alone say nothing: accuracies of 64 prompts are often equal."""
    one, same, near = (setting(name, 0.7, 0.8, reward=reward) for name, reward in (("a", 0.5), ("b", 0.5), ("c", 0.4)))
    said = sentence(best_of([one, same, near], 1.0), "m")
    assert said.endswith("not separable from c; the same to the last digit with b: check that they differ")


def test_a_setting_that_lost_seeds_is_not_the_best() -> None:
    lost, whole = setting("lost", 0.9, None, status="failed"), setting("whole", 0.1, 0.2)
    assert best_of([lost, whole], 1.0) == [whole]
    assert sentence(best_of([lost], 1.0), "m") == "no setting is complete with all its seeds"


def test_the_frontier_is_what_no_other_run_beats_in_both() -> None:
    points = [(0.3, 0.5), (0.1, 0.2), (0.2, 0.6), (0.1, 0.3), (0.9, 0.6), (1.0, 0.7)]
    trials = [TrialResult("", 0, "", "complete", kl=kl, reward=reward) for kl, reward in points]
    unknown = TrialResult("", 0, "", "failed", reward=9.0)
    assert frontier([*trials, unknown]) == [(0.1, 0.3), (0.2, 0.6), (1.0, 0.7)]


@pytest.mark.parametrize(("first", "steps"), [(1, 30), (2, 27), (4, 12), (5, 4)])
def test_trials_end_where_ray_tune_ends_them(first: int, steps: int) -> None:
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    peer: Any = ASHAScheduler(
        metric="m", mode="max", max_t=steps + 1, grace_period=min(first, steps + 1), reduction_factor=3
    )
    own, source = Halving(first, steps), random.Random(first)
    trials = [SimpleNamespace(trial_id=f"trial-{number}") for number in range(30)]
    for trial in trials:
        peer.on_trial_add(None, trial)
    ended = 0
    active = {trial.trial_id: [trial, 0] for trial in trials}
    while active:
        name = source.choice(sorted(active))
        trial, step = active[name]
        step += source.choice((1, 1, 2))
        if step > steps:
            del active[name]
            continue
        active[name][1] = step
        value = source.random()
        told = peer.on_trial_result(None, trial, {"training_iteration": step, "m": value})
        stops = own.stops(name, step, value)
        assert stops == (told == TrialScheduler.STOP), (name, step)
        if stops:
            ended += 1
            del active[name]
    assert (ended > 5) == (first <= steps)

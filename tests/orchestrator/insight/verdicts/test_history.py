"""Series as the rules read them."""

from __future__ import annotations

import math
import random

import pytest

from troupe.orchestrator.insight.verdicts.history import History, Series, Stretch
from troupe.orchestrator.insight.verdicts.verdict import field, flow


def series(*values: float) -> Series:
    """A series over the steps from 1."""
    return Series("x", tuple(range(1, len(values) + 1)), tuple(values))


def test_a_stretch_that_reaches_the_end_wins_over_a_longer_one() -> None:
    found = series(5, 5, 5, 5, 5, 0, 0, 0, 5, 5, 5).stretch(lambda value: value > 1)
    assert found == Stretch(9, 11, ongoing=True)
    over = series(0, 0, 5, 5, 5, 0, 0, 0).stretch(lambda value: value > 1)
    assert over == Stretch(3, 5, ongoing=False)
    assert found is not None and over is not None and (found.until, over.until) == (None, 5)


def test_single_outliers_make_no_stretch() -> None:
    assert series(0, 0, 9, 0, 0, 0, 9, 0, 0).stretch(lambda value: value > 1, at_least=1) is None
    assert series(5, 5, 0, 5, 5).stretch(lambda value: value > 1, at_least=5) == Stretch(1, 5, ongoing=True)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_trend_and_a_slope_is_one(seed: int) -> None:
    noise = random.Random(seed)
    flat = series(*(noise.gauss(0.5, 0.1) for _ in range(40)))
    assert not flat.trend().rises and not flat.trend().falls
    rising = series(*(noise.gauss(0.02 * step, 0.1) for step in range(40)))
    assert rising.trend().rises and rising.map(lambda value: -value).trend().falls


def test_too_few_values_show_no_trend() -> None:
    assert not series(0, 1, 2, 3).trend().rises


def test_lines_become_series_and_later_lines_of_a_step_win() -> None:
    lines = [
        *({"step": 1, "time": 9.0, "a": 1.0, "kind": "x"}, {"step": 2, "a": math.nan}, {"step": 3, "a": 3.0}),
        *({"step": 3, "a": 4.0}, {"no": "step"}),
    ]
    run = History.of(lines, {"roles": {"policy": {"workers": 2, "threads": None}}})
    assert run["a"] == Series("a", (1, 3), (1.0, 4.0)) and run.nulls["a"] == (2,)
    assert not run["missing"] and run.last_step == 3
    assert run.get("roles.policy.workers") == 2 and run.get("roles.policy.threads", 1) == 1
    assert run.get("roles.critic.workers", 0) == 0


def test_a_count_of_samples_is_a_share_of_what_the_step_dispatched() -> None:
    """Steps of earlier versions do not say what they dispatched: their batch has 2 prompts of 8 samples at most."""
    lines = [{"step": 1, "failed": 4.0}, {"step": 2, "failed": 4.0, "dispatched_samples": 20.0}]
    spec = {
        "schedule": {"prompts_per_step": 2},
        "algorithm": {"group_size": 4},
        "data": {"train": [{"name": "a"}, {"name": "b", "group_size": 8}]},
    }

    def shares(run: History) -> Series:
        return run.share_of_samples(run["failed"])

    assert shares(History.of(lines, spec)) == Series("failed", (1, 2), (4 / 16, 4 / 20))
    assert History.of(lines, spec).group_sizes == {4, 8} and History.of([]).group_sizes == {1}
    assert shares(History.of(lines)) == Series("failed", (2,), (4 / 20,))


def test_remedies_are_lines_of_a_spec() -> None:
    assert field("roles.policy.learning_rate", 3e-6) == "roles:\n  policy:\n    learning_rate: 3e-06"
    functions = [{"name": "regex", "args": {"pattern": "a: b"}, "weight": 1.0, "label": None}]
    assert flow("roles.reward.functions", functions) == (
        "roles:\n  reward:\n    functions:\n      - {name: regex, args: {pattern: 'a: b'}, weight: 1.0}"
    )

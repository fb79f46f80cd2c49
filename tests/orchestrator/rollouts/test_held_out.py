"""Estimates on held-out sets: against hand-worked values, exact enumeration and tables of quantiles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from troupe.orchestrator.rollouts.evaluation_log import EvaluationLog, read_evaluations
from troupe.orchestrator.rollouts.held_out import MeanEstimate, PromptResult, SetResult, comparisons, summarize, vote
from troupe.workers.contract.rewards import NO_ANSWER

NONE = int(NO_ANSWER)


def result(*rewards: float | None, answers: tuple[int | None, ...] = (), level: str = "") -> PromptResult:
    return PromptResult(tuple(rewards), (4,) * len(rewards), 1, answers, level)


@given(st.lists(st.tuples(st.sampled_from([NONE, 0, 1, 2]), st.booleans()), min_size=1, max_size=5))
def test_a_vote_is_the_mean_over_every_order_in_which_samples_could_be_asked(samples: list[tuple[int, bool]]) -> None:
    """In each order the first sample whose answer is among the most frequent ones speaks for all."""
    counts = [sum(other == answer for other, _ in samples) for answer, _ in samples]
    most = max((n for (answer, _), n in zip(samples, counts, strict=True) if answer != NONE), default=0)
    right = []
    for order in itertools.permutations(range(len(samples))):
        first = [i for i in order if samples[i][0] != NONE and counts[i] == most]
        right.append(bool(first) and samples[first[0]][1])
    expected = Fraction(sum(right), len(right))
    assert vote([a for a, _ in samples], [s for _, s in samples]) == pytest.approx(float(expected))


def test_votes_by_hand() -> None:
    assert vote([0, 0, 1], [True, True, False]) == 1.0
    assert vote([0, 1, 1], [True, False, False]) == 0.0
    assert vote([0, 0, 1, 1, 2], [True, True, False, False, True]) == 0.5  # two answers tie
    assert vote([0, 0, NONE, NONE, NONE], [True, True, False, False, False]) == 1.0  # who has no answer does not vote
    assert vote([NONE, NONE], [False, False]) == 0.0
    assert vote([0, 0], [True, False]) == 0.5  # the same answer, of which one is not in the form that is asked for


def test_estimates_by_hand() -> None:
    """avg: (1/2 + 1 + 0) / 3; pass@2: (5/6 ...): C(2,2)/C(4,2) of the first, 1, 0; one sample of the last failed."""
    results = [
        result(1.0, 0.0, 0.5, 1.0, answers=(0, 1, 2, 0)),
        result(1.0, 1.0, 1.0, 1.0, answers=(0, 0, 0, 0)),
        result(0.0, 0.0, None, 0.0, answers=(0, 0, 0, 0)),
    ]
    found = summarize(results, refused=2, samples=4, solved_at=1.0, average="avg", pass_at=[2, 4])
    values = {name: estimate.value for name, estimate in found.estimates.items()}
    assert values == {
        "reward": pytest.approx(6.5 / 11),
        "avg": pytest.approx(0.5),
        "pass@2": pytest.approx((5 / 6 + 1 + 0) / 3),
        "pass@4": pytest.approx(1.0),
        "maj@4": pytest.approx(1.0),
    }
    assert {name: estimate.prompts for name, estimate in found.estimates.items()} == {
        "reward": 3, "avg": 3, "pass@2": 3, "pass@4": 2, "maj@4": 2,
    }  # fmt: skip
    assert (found.prompts, found.refused, found.failed_samples) == (3, 2, 1)
    assert (found.response_tokens, found.truncated) == (4.0, 0.25)
    metrics = found.metrics("eval/math/")
    assert metrics["eval/math/avg"] == pytest.approx(0.5)
    assert metrics["eval/math/avg_low"] <= 0.5 <= metrics["eval/math/avg_high"]
    assert "eval/math/pass@2_low" not in metrics


def test_accuracy_counts_samples_and_avg_prompts() -> None:
    results = [result(1.0, 1.0, 1.0), result(0.0, None, None)]
    for average, expected in (("accuracy", 3 / 4), ("avg", 1 / 2)):
        found = summarize(results, refused=0, samples=3, solved_at=1.0, average=average, pass_at=[2])
        assert found.estimates[average].value == pytest.approx(expected)


def interval(*results: PromptResult, name: str = "reward") -> tuple[float | None, float | None]:
    samples = max(len(one.rewards) for one in results)
    found = summarize(results, refused=0, samples=samples, solved_at=1.0, average="avg", pass_at=[]).estimates[name]
    return found.low, found.high


def test_the_interval_of_a_mean_is_student_s() -> None:
    """Of many prompts and of three; the values of t are a table's (Abramowitz and Stegun 1964, 26.10)."""
    for prompts, t in ((400, 1.9659), (61, 2.0003), (13, 2.1788), (3, 4.3027)):
        values = np.random.default_rng(prompts).beta(2, 3, size=prompts)
        half = t * values.std(ddof=1) / prompts**0.5
        bounds = interval(*(result(float(value)) for value in values))
        assert bounds == (
            pytest.approx(values.mean() - half, abs=2e-3 * half),
            pytest.approx(values.mean() + half, rel=1e-3),
        )


def test_the_interval_of_a_ratio_by_hand() -> None:
    """Samples of one prompt stay together. R = 4/6, residuals 1, -2/3, -1/3, variance 14/9 * 3/2 / 36."""
    low, high = interval(result(1.0, 1.0, 1.0), result(0.0), result(1.0, 0.0))
    half = 4.3027 * (14 / 9 * 3 / 2 / 36) ** 0.5
    assert (low, high) == (pytest.approx(4 / 6 - half), pytest.approx(4 / 6 + half))


@pytest.mark.parametrize(("solved", "prompts", "low", "high"), [(20, 20, 0.8389, 1.0), (0, 10, 0.0, 0.2775)])
def test_prompts_that_all_agree_leave_wilson_s_doubt(solved: int, prompts: int, low: float, high: float) -> None:
    results = [result(float(number < solved)) for number in range(prompts)]
    assert interval(*results, name="avg") == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert interval(*results) == (None, None)  # nothing tells how far a reward can vary


@pytest.mark.parametrize("more", [0.0, 1e-3])
def test_equal_shares_inside_0_and_1_are_at_most_one_trial_for_each_sample(more: float) -> None:
    """A half of 6 and of 12 trials by Wilson, also if the prompts differ by next to nothing."""
    ties = [replace(result(1.0), comparisons={"win_rate": [0.5]}) for _ in range(5)]
    ties.append(replace(result(1.0), comparisons={"win_rate": [0.5 + more]}))
    wide, narrow = (pytest.approx((0.5 - half, 0.5 + half), abs=1e-3) for half in (0.3124, 0.2463))
    assert interval(*ties, name="win_rate") == wide
    assert interval(*[result(1.0, 0.0)] * 6, name="avg") == narrow


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("prompts", [5, 20, 40])
def test_about_nineteen_of_twenty_intervals_cover_the_true_share(prompts: int, rate: float, samples: int) -> None:
    """Prompts differ in how often they are solved."""
    generator, runs = np.random.default_rng(7), 1000
    covered = 0
    for _ in range(runs):
        chances = generator.beta(2 * rate, 2 * (1 - rate), size=(prompts, 1))
        solved = (generator.random((prompts, samples)) < chances).astype(float)
        low, high = interval(*(result(*group) for group in solved.tolist()), name="avg")
        assert low is not None and high is not None
        covered += low <= rate <= high
    assert covered / runs >= 0.915  # of 5 prompts with one sample each 30 of 32 outcomes cover a half


def test_a_single_prompt_has_no_interval_and_no_reward_no_estimate() -> None:
    found = summarize([result(0.5)], refused=0, samples=1, solved_at=None, average="avg", pass_at=[])
    assert found.estimates == {"reward": MeanEstimate(0.5, None, None, 1)}
    assert "eval/reward_low" not in found.metrics("eval/")
    failed = summarize([result(None)], refused=1, samples=1, solved_at=1.0, average="avg", pass_at=[])
    assert failed.metrics("eval/") == {"eval/prompts": 1.0, "eval/refused": 1.0, "eval/failed_samples": 1.0}


def test_a_reward_that_does_not_say_what_is_solved_has_the_best_of_k() -> None:
    """Of 1, 2 and 4 two samples have 2, 4 or 4 as the best; the second prompt has too few for 3."""
    results = [result(4.0, 1.0, 2.0), result(0.0, None, 6.0)]
    found = summarize(results, refused=0, samples=3, solved_at=None, average="avg", pass_at=[2, 3]).estimates
    assert {name: one.value for name, one in found.items()} == {
        "reward": pytest.approx(13 / 5), "best@2": pytest.approx((10 / 3 + 6) / 2), "best@3": 4.0,
    }  # fmt: skip
    low, high = found["best@2"].low, found["best@2"].high
    assert low is not None and high is not None and low < 10 / 3 and high > 6, "no share of a whole"


def test_an_estimate_of_a_single_prompt_has_no_interval_whatever_the_set_has() -> None:
    """Of three prompts one has rewards; of two with rewards, one has enough samples for pass@2 and for a vote."""
    alone = summarize(
        [result(0.5), result(None), result(None)], refused=0, samples=1, solved_at=1.0, average="avg", pass_at=[]
    )
    assert alone.estimates == {"reward": MeanEstimate(0.5, None, None, 1), "avg": MeanEstimate(0.0, None, None, 1)}
    assert not {"eval/reward_low", "eval/avg_high"} & {*alone.metrics("eval/")}
    results = [result(1.0, 0.0, answers=(0, 0)), result(0.0, None, answers=(0, 1))]
    found = summarize(results, refused=0, samples=2, solved_at=1.0, average="avg", pass_at=[2]).estimates
    assert found["pass@2"] == MeanEstimate(1.0, None, None, 1) and found["maj@2"] == MeanEstimate(0.5, None, None, 1)
    assert found["avg"].low is not None and found["avg"].prompts == 2


def test_levels_are_reported_in_the_order_of_their_numbers() -> None:
    results = [result(1.0, level="10"), result(0.0, level="2"), result(1.0, level="2"), result(1.0), result(None)]
    found = summarize(results, refused=0, samples=1, solved_at=1.0, average="avg", pass_at=[])
    assert {level: of["avg"].value for level, of in found.levels.items()} == {"2": 0.5, "10": 1.0}
    assert list(found.levels) == ["2", "10"]
    assert found.metrics("eval/m/")["eval/m/level/2/avg"] == 0.5


def test_a_resumed_run_replaces_evaluations_after_its_checkpoint(tmp_path: Path) -> None:
    prompts = [result(1.0, 0.0, answers=(0, 1), level="2"), result(1.0, 1.0, answers=(0, 0), level="3")]
    found = summarize(prompts, refused=1, samples=2, solved_at=1.0, average="avg", pass_at=[2])
    file = tmp_path / "evaluation.json"
    log = EvaluationLog(file, {"math": {}}, 0)
    for step in (0, 2, 4):
        log.add(step, {"math": found})
    log = EvaluationLog(file, {"math": {}}, 2)
    log.add(3, {"math": found})
    log.add(3, {"math": found})
    content = read_evaluations(file)
    assert [one["step"] for one in content["evaluations"]] == [0, 2, 3]
    assert TypeAdapter(SetResult).validate_python(content["evaluations"][0]["sets"]["math"]) == found
    file.write_text("[]")
    assert read_evaluations(file) == read_evaluations(tmp_path / "none") == {}


def test_a_win_rate_is_a_mean_over_prompts_with_its_interval_and_consistency() -> None:
    """Points of two judges, their mean; a sample that one of them did not compare is in neither value."""
    components = {
        "one": (1.0, 0.5, None),
        "one_consistency": (1.0, 0.0, None),
        "other": (0.5, 0.5, 1.0),
        "other_consistency": (0.0, 0.0, 1.0),
        "length": (9.0, 9.0, 9.0),
    }
    found = comparisons(components, ("one", "other"))
    assert found == {"win_rate": [0.75, 0.5, None], "position_consistency": [0.5, 0.0, None]}
    assert comparisons(components, ()) == {} == comparisons({"one": (None, None)}, ("one",))
    results = [replace(result(1.0, 1.0, 1.0), comparisons=found), replace(result(1.0), comparisons={"win_rate": [1.0]})]
    made = summarize(results, refused=0, samples=3, solved_at=None, average="avg", pass_at=[]).metrics("eval/")
    assert made["eval/win_rate"] == pytest.approx((0.75 + 0.5 + 1.0) / 3)
    assert 0.0 <= made["eval/win_rate_low"] < made["eval/win_rate"] < made["eval/win_rate_high"] <= 1.0
    assert made["eval/position_consistency"] == 0.25
    assert "eval/win_rate" not in summarize(
        [result(1.0)], refused=0, samples=1, solved_at=None, average="avg", pass_at=[]
    ).metrics("eval/")


def test_players_of_a_game_have_their_own_results() -> None:
    """Three games of two players for each prompt: `first` wins one, `second` all others."""
    games = [
        result(1.0, 0.0, 0.0, 1.0, 0.0, 1.0, answers=(0, 1, 1, 0, 1, 0)),
        result(0.0, 1.0, None, 1.0, 0.0, 1.0, answers=(1, 0, NONE, 0, 1, 0)),
    ]
    found = summarize(
        games, refused=0, samples=3, solved_at=1.0, average="avg", pass_at=[2], players=("first", "second")
    )
    assert set(found.estimates) == {"reward", "avg"}, "samples of two players are no attempts at one thing"
    assert found.estimates["reward"].value == pytest.approx(6 / 11)
    values = {player: {name: one.value for name, one in of.items()} for player, of in found.players.items()}
    first = {"reward": 1 / 5, "avg": 1 / 6, "pass@2": 1 / 3, "maj@3": 0.0}
    second = {"reward": 5 / 6, "avg": 5 / 6, "pass@2": 1.0, "maj@3": 1.0}
    assert values == {"first": pytest.approx(first), "second": pytest.approx(second)}
    assert found.metrics("eval/")["eval/players/second/pass@2"] == 1.0
    lost = summarize(
        [result(None, 1.0)], refused=0, samples=1, solved_at=1.0, average="avg", pass_at=[], players=("a", "b")
    )
    assert set(lost.players) == {"b"} and lost.failed_samples == 1

"""The curriculum: probabilities by hand, frequencies, dependence on finished steps alone, and resumption."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.data.test_prompts import pool_of
from troupe.orchestrator.data.curriculum import Curriculum, Results, draw_probability
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptPick, PromptSource
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.sections import CurriculumConfig
from troupe.workers.contract.messages import RewardSummary

DEFAULT = CurriculumConfig()


def alone(config: CurriculumConfig, seed: int, solved_at: float = 1.0) -> Curriculum:
    """The curriculum of one source."""
    return Curriculum(config, seed, RowTable((0,), (solved_at,)))


def rewards(*values: float | None, **components: tuple[float | None, ...]) -> RewardSummary:
    statuses = tuple("ok" if value is not None else "timeout" for value in values)
    return RewardSummary("p", 0, statuses, values, components)


def finished(curriculum: Curriculum, row: int, solved: int, samples: int) -> Curriculum:
    """One step in which `solved` of the row's `samples` were solved."""
    curriculum.observe(row, rewards(*[1.0] * solved, *[0.0] * (samples - solved)))
    curriculum.mark_trained()
    return curriculum


@pytest.mark.parametrize(
    ("solved", "samples", "probability"),
    [(0, 0, 1.0), (4, 8, 1.0), (0, 8, 0.36), (8, 8, 0.36), (1, 8, 0.64), (0, 38, 0.1), (0, 18, 0.19)],
)
def test_probabilities_by_hand(solved: int, samples: int, probability: float) -> None:
    """p = 1/10 gives 4 * 1/10 * 9/10 = 0.36; p = 1/40 gives 0.0975, below the floor of 0.1."""
    assert draw_probability(Results(solved, samples).pass_rate, 0.1) == pytest.approx(probability)


def test_earlier_results_decay_once_per_step() -> None:
    """8 of 8, then 0 of 4 with decay 1/2: 4 of 8. Two groups of one step count alike."""
    curriculum = finished(alone(CurriculumConfig(decay=0.5), 1), 3, 8, 8)
    curriculum.observe(3, rewards(0.0, 0.0))
    curriculum.observe(3, rewards(0.0, 0.0))
    curriculum.mark_trained()
    assert curriculum.state()["results"] == [[3, 4.0, 8.0]]
    forgetful = finished(finished(alone(CurriculumConfig(decay=0.0), 1), 3, 8, 8), 3, 1, 4)
    assert forgetful.state()["results"] == [[3, 1.0, 4.0]]


def test_solved_is_judged_on_the_reward_or_on_one_component_and_failed_samples_do_not_count() -> None:
    group = rewards(0.9, 1.2, None, 0.4, correct=(1.0, 0.0, 1.0, 1.0))
    on_reward, on_correct = alone(CurriculumConfig(), 1, 0.9), CurriculumConfig(component="correct")
    for curriculum, solved in ((on_reward, 2.0), (alone(on_correct, 1), 2.0)):
        curriculum.observe(0, group)
        curriculum.mark_trained()
        assert curriculum.state()["results"] == [[0, solved, 3.0]]
    strict = alone(CurriculumConfig(component="correct"), 1, 1.5)
    strict.observe(0, group)
    assert strict.state()["step"] == [[0, 0.0, 3.0]]


def test_a_row_is_drawn_as_often_as_its_probability_says() -> None:
    """Over 4000 passes, within five standard errors; rows and seeds are independent of each other."""
    passes = 4000
    curriculum = finished(alone(DEFAULT, 5), 1, 0, 8)  # 0.36
    finished(curriculum, 2, 0, 78)  # floor
    counts = [sum(curriculum.draws(row, epoch) for epoch in range(passes)) for row in range(3)]
    assert counts[0] == passes  # without results
    for count, probability in zip(counts[1:], (0.36, 0.1), strict=True):
        assert abs(count - passes * probability) < 5 * math.sqrt(passes * probability * (1 - probability))
    other = finished(alone(DEFAULT, 6), 1, 0, 8)
    both = sum(curriculum.draws(1, epoch) and other.draws(1, epoch) for epoch in range(passes))
    assert abs(both - passes * 0.36**2) < 5 * math.sqrt(passes * 0.36**2 * (1 - 0.36**2))


def test_without_results_every_prompt_is_drawn_in_the_order_of_the_seed() -> None:
    plain, source = PromptSource(pool_of(7), 3), PromptSource(pool_of(7), 3, alone(DEFAULT, 3))
    assert [source.next() for _ in range(20)] == [plain.next() for _ in range(20)]


def test_drawn_prompts_are_those_of_the_plain_order_without_the_skipped_ones() -> None:
    curriculum = alone(DEFAULT, 3)
    for row in range(0, 20, 2):
        finished(curriculum, row, 8, 8)
    source, plain = PromptSource(pool_of(20), 3, curriculum), PromptSource(pool_of(20), 3)
    drawn = [source.next() for _ in range(100)]
    assert len({pick.prompt_uid for pick in drawn}) == 100
    rest = iter([plain.next() for _ in range(400)])
    assert all(pick in rest for pick in drawn)  # the same order, with gaps
    assert sum(pick.row % 2 for pick in drawn) > 65  # the odd rows are never skipped: 1 / 1.36 of 100


def test_results_count_only_after_their_step_and_in_any_order() -> None:
    groups = [(row, rewards(*[float(row % 3 == 0)] * 6)) for row in range(12)] + [(4, rewards(1.0, 0.0))]
    one, other, untouched = (alone(DEFAULT, 3) for _ in range(3))
    for row, group in groups:
        one.observe(row, group)
    for row, group in reversed(groups):
        other.observe(row, group)

    def decisions(curriculum: Curriculum) -> list[bool]:
        return [curriculum.draws(row, epoch) for epoch in range(9) for row in range(12)]

    assert decisions(one) == decisions(untouched) == [True] * 108
    for curriculum in (one, other):
        curriculum.mark_trained()
    assert decisions(one) == decisions(other) != [True] * 108


def test_metrics_of_a_step_by_hand() -> None:
    curriculum = alone(CurriculumConfig(decay=1.0), 3)
    curriculum.observe(0, rewards(*[1.0] * 30))
    curriculum.observe(1, rewards(1.0, 0.0))
    curriculum.mark_trained()
    assert curriculum.metrics() == {
        "curriculum/pass_rate": 31 / 32,
        "curriculum/skipped": 0.0,
        "curriculum/seen": 2.0,
        "curriculum/set_aside": 1.0,
    }
    skipped = sum(not curriculum.draws(0, epoch) for epoch in range(40))
    curriculum.observe(0, rewards(*[0.0] * 30))  # 30 of 60: no longer set aside
    curriculum.mark_trained()
    found = curriculum.metrics()
    assert (found["curriculum/skipped"], found["curriculum/set_aside"]) == (skipped, 0.0)
    assert skipped > 20


def play(source: PromptSource, curriculum: Curriculum, steps: int, group: int) -> list[PromptPick]:
    """Draw four prompts a step; a row's solved samples follow from its number and the step."""
    drawn = []
    for step in range(steps):
        picks = [source.next() for _ in range(4)]
        for pick in picks:
            solved = min(group, (pick.row * 7 + step) % (group + 3))
            curriculum.observe(pick.row, rewards(*[1.0] * solved, *[0.0] * (group - solved)))
        curriculum.mark_trained()
        drawn += picks
    return drawn


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 30), st.integers(0, 2**31 - 1), st.integers(0, 12), st.integers(1, 12), st.floats(0, 1), st.data()
)
def test_a_restored_curriculum_draws_the_same(
    rows: int, seed: int, before: int, after: int, decay: float, data: st.DataObject
) -> None:
    """Also where the checkpoint falls between the results of two groups of a step."""
    config = CurriculumConfig(decay=decay)
    curriculum = alone(config, seed)
    source = PromptSource(pool_of(rows), seed, curriculum)
    play(source, curriculum, before, 8)
    pending = data.draw(st.lists(st.integers(0, rows - 1), max_size=3))
    for row in pending:
        curriculum.observe(row, rewards(1.0, 0.0, 1.0))
    state = json.loads(json.dumps(source.state()))
    resumed = alone(config, seed)
    again = PromptSource(pool_of(rows), seed, resumed)
    again.restore(state)
    assert again.state() == source.state()
    assert play(again, resumed, after, 8) == play(source, curriculum, after, 8)
    assert again.state() == source.state()
    assert resumed.metrics() == curriculum.metrics()


def test_the_state_follows_the_prompts_with_results_not_the_pool() -> None:
    curriculum = finished(finished(alone(DEFAULT, 1), 4999, 1, 8), 17, 2, 8)
    assert len(json.dumps(PromptSource(pool_of(5000), 1, curriculum).state())) < 300


def test_a_checkpoint_without_a_curriculum_starts_one_and_one_with_it_is_read_without() -> None:
    plain = PromptSource(pool_of(10), 1)
    for _ in range(13):
        plain.next()
    source = PromptSource(pool_of(10), 1, alone(DEFAULT, 1))
    source.restore(plain.state())
    assert source.next() == plain.next()
    seen = PromptSource(pool_of(10), 1, finished(alone(DEFAULT, 1), 3, 0, 8))
    without = PromptSource(pool_of(10), 1)
    without.restore(seen.state())
    assert len({without.next().row for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "other"}, "the training data are not the checkpoint's"),
        ({"curriculum": {}}, "the curriculum's state is damaged"),
        ({"curriculum": {"results": [[10, 0, 1]], "step": [], "skipped": 0}}, "the curriculum's state is damaged"),
        ({"curriculum": {"results": [[1, 2, 1]], "step": [], "skipped": 0}}, "the curriculum's state is damaged"),
        ({"curriculum": {"results": [[1, 2]], "step": [], "skipped": 0}}, "the curriculum's state is damaged"),
        ({"curriculum": {"results": [[1, "x", 1]], "step": [], "skipped": 0}}, "the curriculum's state is damaged"),
        ({"curriculum": {"results": [], "step": None, "skipped": 0}}, "the curriculum's state is damaged"),
        ({"curriculum": None}, "the curriculum's state is damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    source = PromptSource(pool_of(10), 1, finished(alone(DEFAULT, 1), 3, 0, 8))
    source.next()
    before = source.state()
    with pytest.raises(DataError, match=f"cannot resume: {message}"):
        source.restore(before | change)
    assert source.state() == before

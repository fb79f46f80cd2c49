"""A teacher that returns the log-probs of whole sequences: its scores of a response, and samples that have none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.workers.algorithms.test_train_batch import rollout_table
from troupe.workers.contract.config import ScoresConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary
from troupe.workers.models.distillation import bucketed
from troupe.workers.models.prompt_logprobs import PromptLogprobs, ResponseScores, score_response
from troupe.workers.teacher import SequenceTeacher

VOCABULARY, K = 11, 3
SEQUENCE = [4, 7, 1, 9, 2, 2]
LOGITS = 3 * torch.randn(len(SEQUENCE) - 1, VOCABULARY, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def returned(sequence: Sequence[int] = SEQUENCE, logits: torch.Tensor = LOGITS, k: int = K) -> PromptLogprobs:
    """What an engine returns of a sequence: each token but the first, then the likeliest in its place."""
    ids = torch.cat([torch.tensor(sequence[1:])[:, None], logits.topk(k).indices], 1)
    return PromptLogprobs(ids.numpy(), logits.log_softmax(-1).gather(-1, ids).numpy())


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_the_scores_of_a_response_are_those_of_its_logits(tokens: int) -> None:
    found = score_response(returned(), SEQUENCE, tokens, K)
    assert isinstance(found, ResponseScores)
    logits, targets = LOGITS[-tokens:], torch.tensor(SEQUENCE[-tokens:])
    own = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert np.abs(found.logprobs - own.numpy()).max() < 1e-12
    ids = logits.topk(K).indices
    assert found.top_ids.tolist() == ids.tolist()
    assert np.abs(found.top_logprobs - bucketed(logits, ids).numpy()).max() < 1e-9


def test_all_other_tokens_together_have_no_less_than_what_rounding_leaves() -> None:
    certain = torch.full((5, VOCABULARY), -200.0, dtype=torch.double)
    certain[:, 6] = 0.0
    found = score_response(returned(logits=certain), SEQUENCE, 2, K)
    assert isinstance(found, ResponseScores)
    assert found.top_logprobs[:, -1] == pytest.approx(np.log(2.0**-24))


def cut(one: PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(one.ids[:-1], one.logprobs[:-1])


def narrow(one: PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(one.ids, one.logprobs[:, :-1])


def shifted(one: PromptLogprobs) -> PromptLogprobs:
    return replace(one, ids=np.roll(one.ids, 1, 0))


def nan(one: PromptLogprobs) -> PromptLogprobs:
    logprobs = one.logprobs.copy()
    logprobs[-1, 1] = np.nan
    return replace(one, logprobs=logprobs)


def certain(one: PromptLogprobs) -> str:
    return f"no log-probs of {len(one.ids)} tokens"


class Given(SequenceTeacher):
    """Answers with the log-probs of `SEQUENCE`, the second time changed."""

    def __init__(self, change: Callable[[PromptLogprobs], PromptLogprobs | str], k: int, longest: int = 6) -> None:
        super().__init__(ScoresConfig(column="teacher.math", top_k=k), ModelConfig(path="m"), longest)
        self.change, self.k = change, k

    async def sequences(self, sequences: Sequence[list[int]]) -> list[PromptLogprobs | str]:
        given = [returned(one, LOGITS[: len(one) - 1], self.k) for one in sequences]
        return [self.change(one) if number == 1 else one for number, one in enumerate(given)]


def scored(teacher: SequenceTeacher) -> tuple[ScoreSummary, pa.Table]:
    """The scores of rows 2 and 0 of three in two tables."""
    table = rollout_table(
        [("a", 0), ("a", 1), ("b", 0)], [2, 1, 4], prompt_ids=[[4, 7, 1, 9], [4, 7, 1], [4, 7]],
        response_ids=[[2, 2], [9], [1, 9, 2, 2]],
    )  # fmt: skip
    plan = RankPlan(((2,), (0,)), total_loss_tokens=6, total_sequences=2)
    return asyncio.run(teacher.score(plan, table.slice(0, 1), table.slice(1)))


@pytest.mark.parametrize("k", [0, K])
def test_the_plans_rows_are_scored_in_its_order(k: int) -> None:
    summary, table = scored(Given(lambda one: one, k))
    assert (summary.rows, summary.failed) == (2, {})
    assert table.column("prompt_uid").to_pylist() == ["b", "a"]
    expected = LOGITS.log_softmax(-1).gather(-1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0].float().tolist()
    assert table.column("teacher.math").to_pylist() == [pytest.approx(expected[1:]), pytest.approx(expected[3:])]
    assert ("teacher_ids" in table.column_names) == bool(k)
    if k:
        assert [len(row) for row in table.column("teacher_logprobs").to_pylist()] == [4 * (k + 1), 2 * (k + 1)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut, "its log-probs have the shapes (4, 4) and (4, 4), not (5, 4)"),
        (narrow, "its log-probs have the shapes (5, 4) and (5, 3), not (5, 4)"),
        (shifted, "its log-probs are of token 2 at 1, not of 7"),
        (nan, "the score of a token is not finite"),
        (certain, "no log-probs of 5 tokens"),
    ],
)
def test_a_sample_without_its_own_log_probs_fails_alone(
    change: Callable[[PromptLogprobs], PromptLogprobs | str], why: str
) -> None:
    summary, table = scored(Given(change, K))
    assert summary.failed == {("a", 0): why}
    good, bad = table.column("teacher_logprobs").to_pylist()
    assert np.isfinite(good).all() and np.isnan(bad).any()


def test_a_sample_that_is_too_long_fails_before_it_is_asked_for() -> None:
    summary, _ = scored(Given(lambda one: one, K, longest=5))
    assert summary.failed == dict.fromkeys([("b", 0), ("a", 0)], "it has more than 5 tokens")


def test_a_plan_without_rows_gives_an_empty_table() -> None:
    table = rollout_table([("a", 0)], [1], prompt_ids=[[4]], response_ids=[[2]])
    for k in (0, K):
        summary, scores = asyncio.run(Given(lambda one: one, k).score(RankPlan(((),), 0, 0), table))
        assert (summary.rows, scores.num_rows, "teacher_ids" in scores.column_names) == (0, 0, bool(k))

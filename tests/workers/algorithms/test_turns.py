"""Advantages over the turns of an episode: rewards of turns, text that nobody sampled, and rows of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest

from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.messages import REWARDS, ROLLOUTS, PrepareRequest, TrainSummary, token_scores

GAMMA, LAMBDA = 0.9, 0.8
MASK = [True, True, False, False, True, False, True, True]
"""Two tokens, an observation of two, one token, an observation of one, two tokens."""
VALUES = [0.5, 0.25, 9.0, 9.0, -0.5, 9.0, 1.0, 0.125]
"""The critic's value of what nobody sampled must not matter."""
TURNS = [(2, 0.25), (5, -1.0), (8, 2.0)]


def table(segments: Sequence[slice], prompt: int = 2) -> list[pa.Table]:
    """One sample, cut into rows; each row's prompt has another length."""
    rows, values = [], []
    for number, part in enumerate(segments):
        mask = MASK[part]
        identity = {"prompt_uid": "p", "sample_index": 0, "attempt": 0, "segment": number}
        row: dict[str, Any] = dict.fromkeys(ROLLOUTS.names, "") | identity
        rows.append(
            row
            | {
                "prompt_ids": [1] * (prompt + number),
                "response_ids": list(range(len(mask))),
                "rollout_logprobs": [-1.0 if own else 0.0 for own in mask],
                "loss_mask": mask,
                "weight_versions": [],
                "turns": [],
                "turn_rewards": [],
                "generate_s": 0.0,
                "first_token_s": 0.0,
            }
        )
        values.append(identity | {"values": VALUES[part]})
    spans = [{"end": end, "reward": reward} for end, reward in TURNS]
    reward = {"prompt_uid": "p", "sample_index": 0, "attempt": 0, "status": "ok", "reward": 1.25}
    reward |= {"components": [], "reward_spans": spans}
    return [
        pa.Table.from_pylist(rows, schema=ROLLOUTS),
        pa.Table.from_pylist([reward], schema=REWARDS),
        pa.Table.from_pylist(values[::-1], schema=token_scores("values")),
    ]


def prepared(segments: Sequence[slice]) -> tuple[TrainSummary, pa.Table]:
    config = AdvantageConfig(estimator="gae", gamma=GAMMA, gae_lambda=LAMBDA)
    return prepare(config, PrepareRequest((("p", 0),)), table(segments))


def by_hand() -> list[float]:
    """GAE over the five sampled tokens: a state follows the next sampled token's, whatever was added between them."""
    values = [value for value, own in zip(VALUES, MASK, strict=True) if own]
    rewards = [0.0, 0.25, -1.0, 0.0, 2.0]
    advantages = [0.0] * 5
    following = 0.0
    for t in reversed(range(5)):
        next_value = values[t + 1] if t < 4 else 0.0
        following = rewards[t] + GAMMA * next_value - values[t] + GAMMA * LAMBDA * following
        advantages[t] = following
    return advantages


def test_gae_with_a_critic_steps_over_what_nobody_sampled_and_credits_turns() -> None:
    summary, batch = prepared([slice(0, 8)])
    expected = iter(by_hand())
    wanted = [next(expected) if own else 0.0 for own in MASK]
    assert batch["advantages"].to_pylist()[0] == pytest.approx(wanted, abs=1e-6)
    returns = [a + v if own else 0.0 for a, v, own in zip(wanted, VALUES, MASK, strict=True)]
    assert batch["returns"].to_pylist()[0] == pytest.approx(returns, abs=1e-6)
    assert [row.loss_tokens for row in summary.rows] == [5]
    # The last turn by hand: 2 - 0.125 = 1.875; before it 0 + 0.9 * 0.125 - 1 + 0.72 * 1.875 = 0.4625.
    assert batch["advantages"].to_pylist()[0][-2:] == pytest.approx([0.4625, 1.875], abs=1e-6)


@pytest.mark.parametrize("cut", [2, 4, 5, 6])
def test_rows_of_one_sample_have_the_advantages_of_the_sample(cut: int) -> None:
    _, whole = prepared([slice(0, 8)])
    summary, parts = prepared([slice(0, cut), slice(cut, 8)])
    joined = [value for row in parts["advantages"].to_pylist() for value in row]
    assert joined == whole["advantages"].to_pylist()[0]
    assert parts["segment"].to_pylist() == [0, 1]
    assert sum(row.loss_tokens for row in summary.rows) == 5
    assert [row.tokens for row in summary.rows] == [2 + cut, 3 + 8 - cut]
    assert len({row.group for row in summary.rows}) == 2, "rows with different prompts share none"


def test_a_missing_row_of_a_sample_is_refused() -> None:
    rollouts, rewards, values = table([slice(0, 4), slice(4, 8)])
    with pytest.raises(ValueError, match=r"p\[0\]: values has segments \[1\] of 2"):
        prepare(AdvantageConfig(estimator="gae"), PrepareRequest((("p", 0),)), [rollouts, rewards, values.slice(0, 1)])
    with pytest.raises(ValueError, match="appears twice in values"):
        prepare(AdvantageConfig(estimator="gae"), PrepareRequest((("p", 0),)), [rollouts, rewards, values, values])


@pytest.mark.parametrize("estimator", ["n_step", "returns"])
def test_other_estimators_of_returns_credit_turns_too(estimator: Any) -> None:
    config = AdvantageConfig(estimator=estimator, gamma=1.0, n_steps=100)
    _, batch = prepare(config, PrepareRequest((("p", 0),)), table([slice(0, 8)]))
    to_go = [1.25, 1.25, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0]
    values = VALUES if estimator == "n_step" else [0.0] * 8
    wanted = [r - v if own else 0.0 for r, v, own in zip(to_go, values, MASK, strict=True)]
    assert batch["advantages"].to_pylist()[0] == pytest.approx(wanted, abs=1e-6)


def episode(
    index: int,
    reward: float,
    *rows: tuple[list[int], str, list[int]],
    spans: Sequence[Any] = (),
    uid: str = "p",
    player: str | None = None,
) -> Any:
    """A sample of (prompt, row as letters, tokens): `a` are sampled, `e` the environment's; and its rewards."""
    identity = {"prompt_uid": uid, "sample_index": index, "attempt": 0}
    empty = {"weight_versions": [], "turn_rewards": [], "generate_s": 0.0, "first_token_s": 0.0}
    rollouts = []
    for number, (prompt, letters, tokens) in enumerate(rows):
        turns, at = [], 0
        for letter, run in groupby(letters):
            end = at + len(list(run))
            turns.append({"name": "assistant" if letter == "a" else "environment", "start": at, "end": end})
            at = end
        rollouts.append(
            dict.fromkeys(ROLLOUTS.names, "")
            | identity
            | {"segment": number, "prompt_ids": prompt, "response_ids": tokens, "turns": turns}
            | {"rollout_logprobs": [-1.0] * at, "loss_mask": [letter == "a" for letter in letters]}
            | empty
            | {"player": player}
        )
    ends = [{"end": end, "reward": value} for end, value in spans]
    return rollouts, identity | {"status": "ok", "reward": reward, "components": [], "reward_spans": ends}


@pytest.mark.parametrize("normalize", [False, True])
def test_turns_are_compared_with_turns_that_answer_the_same_observation(normalize: bool) -> None:
    """GiGPO by a loop in float64: the second turns of 0 and 3, and the last of 2, answer [7], although their histories
    differ; 1 answers [8]; nobody shares the prompt of the second row of 2, or answers of another prompt's sample."""
    samples = [
        episode(0, 1.5, ([1], "aaea", [3, 4, 7, 5]), spans=[(2, 0.5), (4, 1.0)]),
        episode(1, 0.0, ([1], "aea", [3, 8, 5])),
        episode(2, 2.0, ([1], "aeea", [4, 7, 7, 6]), ([1, 2], "aea", [6, 7, 5]), spans=[(7, 2.0)]),
        episode(3, 1.0, ([1], "aea", [4, 7, 6]), spans=[(3, 1.0)]),
        episode(0, 9.0, ([1], "aea", [4, 7, 6]), uid="q"),
    ]
    rollouts = pa.Table.from_pylist([row for rows, _ in samples for row in rows], schema=ROLLOUTS)
    rewards = pa.Table.from_pylist([reward for _, reward in samples], schema=REWARDS)
    config = AdvantageConfig(estimator="turn_group", normalize_by_std=normalize, turn_gamma=0.5, turn_coef=0.25)
    keep = (*(("p", index) for index in range(4)), ("q", 0))
    _, table = prepare(config, PrepareRequest(keep), [rollouts, rewards])

    def relative(value: float, among: list[float]) -> float:
        if len(set(among)) < 2:
            return 0.0
        mean = sum(among) / len(among)
        variance = sum((x - mean) ** 2 for x in among) / (len(among) - 1)
        return (value - mean) / (variance**0.5 + 1e-4 if normalize else 1.0)

    # By turn: return, and the returns of the turns in its state.
    first = [0.5 + 0.5 * 1.0, 0.0, 0.5**3 * 2.0, 0.5 * 1.0]
    after_7 = [1.0, 1.0, 2.0]
    second = {0: (1.0, after_7), 1: (0.0, [0.0]), 2: (0.5, [0.5]), 3: (1.0, after_7)}
    whole = [1.5, 0.0, 2.0, 1.0]
    expected = [[relative(whole[n], whole) + 0.25 * relative(first[n], first)] for n in range(4)]
    later = [relative(whole[n], whole) + 0.25 * relative(*second[n]) for n in range(4)]
    alone = relative(2.0, whole)
    assert table["advantages"].to_pylist() == [
        pytest.approx([*expected[0] * 2, 0.0, later[0]], rel=1e-6),
        pytest.approx([*expected[1], 0.0, later[1]], rel=1e-6),
        pytest.approx([*expected[2], 0.0, 0.0, later[2]], rel=1e-6),
        pytest.approx([alone, 0.0, alone + 0.25 * relative(2.0, after_7)], rel=1e-6),
        pytest.approx([*expected[3], 0.0, later[3]], rel=1e-6),
        [0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("normalize", [False, True])
def test_a_planner_and_its_worker_have_the_advantages_of_hierarchical_grpo(normalize: bool) -> None:
    """M-GRPO by a loop in float64: three episodes, whose worker was called once, twice and not at all. Samples of each
    player are compared among themselves, and all rows and turns of a sample have its advantage."""
    earned = {"planner": [1.0, 0.0, 0.5], "worker": [0.25, 1.75, 0.0]}
    planner, task = ([1], "aeaea", [3, 4, 7, 4, 5]), ([2], "aa", [6, 7])
    calls = [[task], [task, ([2, 3], "a", [8])], [([2], "", [])]]
    samples = [
        episode(2 * k + n, earned[player][k], *rows, player=player)
        for k in range(3)
        for n, (player, rows) in enumerate((("planner", [planner]), ("worker", calls[k])))
    ]
    rollouts = pa.Table.from_pylist([row for rows, _ in samples for row in rows], schema=ROLLOUTS)
    rewards = pa.Table.from_pylist([reward for _, reward in samples], schema=REWARDS)
    config = ALGORITHMS["grpo"].advantage.model_copy(update={"normalize_by_std": normalize})
    _, table = prepare(config, PrepareRequest(tuple(("p", index) for index in range(6))), [rollouts, rewards])

    def advantage(player: str, k: int) -> float:
        own = earned[player]
        mean = sum(own) / 3
        return (own[k] - mean) / ((sum((x - mean) ** 2 for x in own) / 2) ** 0.5 + 1e-4 if normalize else 1.0)

    expected = []
    for k in range(3):
        one = advantage("planner", k)
        expected += [[one, 0.0, one, 0.0, one], *([advantage("worker", k)] * len(tokens) for _, _, tokens in calls[k])]
    assert table["advantages"].to_pylist() == [pytest.approx(row, rel=1e-6) for row in expected]


def test_rewards_of_steps_are_not_scaled() -> None:
    config = AdvantageConfig(estimator="gae", reward_scale="batch")
    with pytest.raises(ValueError, match="process rewards cannot be scaled"):
        prepare(config, PrepareRequest((("p", 0),)), table([slice(0, 8)]))

"""Estimators of the advantage against numbers worked by hand, naive float64 loops written from the papers, and their
invariances. Every batch is ragged, and most have holes in the loss mask."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.orchestrator.algorithms.table import ALGORITHMS, KlPenalty
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.algorithms.advantages import (
    STD_EPS,
    SampledTokens,
    best_of_group,
    best_of_subsets_advantages,
    covariant_tokens,
    leave_one_out_advantages,
    max_likelihood_advantages,
    mixture_win_rates,
    n_step_advantages,
    process_advantages,
    returns_to_go,
)
from troupe.workers.algorithms.estimators import estimate, steered_kl_coef
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.advantage_state import AdvantageState, Moments, PromptHistory, SourceMoments
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.messages import (
    REWARDS,
    ROLLOUTS,
    SQUARE_SUMS,
    PrepareRequest,
    TrainSummary,
    token_scores,
)

Nested = list[list[float]]
OWN = 2
"""Samples of a group whose partners follow them, for the estimator that pairs samples with the reference's."""
numbers = st.floats(-50, 50, allow_nan=False)


@dataclass(frozen=True)
class Sample:
    """One response; every list has an entry per response token, those outside the mask included."""

    uid: str
    index: int
    reward: float
    mask: list[bool]
    rollout: list[float]
    old: list[float]
    ref: list[float]
    values: list[float]
    spans: list[tuple[int, float]] = field(default_factory=list)

    def own(self, column: str) -> list[float]:
        """The column on the policy's own tokens."""
        return [x for x, inside in zip(getattr(self, column), self.mask, strict=True) if inside]

    @property
    def kl(self) -> list[float]:
        return [old - ref for old, ref in zip(self.own("old"), self.own("ref"), strict=True)]


def batch_of(seed: int, sizes: Sequence[int] = (3, 4, 2)) -> list[Sample]:
    """Ragged groups of the given sizes; every sample has a separate token, and some have foreign ones."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, size in enumerate(sizes):
        for index in range(size):
            mask = (rng.random(int(rng.integers(1, 7))) < 0.75).tolist() + [True] + [False] * int(rng.integers(0, 2))
            # Tables hold float32: numbers that have an exact one are the same everywhere.
            columns = [rng.normal(size=len(mask)).astype(np.float32).tolist() for _ in range(4)]
            reward = abs(float(np.float32(rng.normal(1.0, 2.0))))
            samples.append(Sample("abcdef"[group], index, reward, mask, *columns))
    return samples


def simple(uid: str, index: int, reward: float, tokens: int = 1) -> Sample:
    zeros = [0.0] * tokens
    return Sample(uid, index, reward, [True] * tokens, zeros, zeros, zeros, zeros)


def tables_of(samples: Sequence[Sample]) -> list[pa.Table]:
    identity = {
        "prompt_uid": [sample.uid for sample in samples],
        "sample_index": [sample.index for sample in samples],
        "attempt": [0] * len(samples),
        "segment": [0] * len(samples),
    }
    empty: list[list[object]] = [[] for _ in samples]
    rollouts: dict[str, list[Any]] = {
        **{name: [""] * len(samples) for name in ROLLOUTS.names},
        **identity,
        "prompt_ids": [[1] for _ in samples],
        "response_ids": [list(range(len(sample.mask))) for sample in samples],
        "rollout_logprobs": [sample.rollout for sample in samples],
        "loss_mask": [sample.mask for sample in samples],
        "weight_versions": empty,
        "turns": empty,
        "turn_rewards": empty,
        "generate_s": [0.0] * len(samples),
        "first_token_s": [0.0] * len(samples),
    }
    rewards: dict[str, list[Any]] = {
        **{name: values for name, values in identity.items() if name != "segment"},
        "status": ["ok"] * len(samples),
        "reward": [sample.reward for sample in samples],
        "components": [[{"name": "only", "value": sample.reward, "weight": 2.0}] for sample in samples],
        "reward_spans": [[{"end": end, "reward": value} for end, value in sample.spans] for sample in samples],
        "feedback": [None] * len(samples),
    }
    return [
        pa.Table.from_pydict(rollouts, schema=ROLLOUTS),
        pa.Table.from_pydict(rewards, schema=REWARDS),
        pa.Table.from_pydict(
            identity | {"old_logprobs": [s.old for s in samples], "square_sums": [s.values for s in samples]},
            schema=token_scores("old_logprobs", SQUARE_SUMS),
        ),
        pa.Table.from_pydict(
            identity | {"ref_logprobs": [s.ref for s in samples]}, schema=token_scores("ref_logprobs")
        ),
        pa.Table.from_pydict(identity | {"values": [s.values for s in samples]}, schema=token_scores("values")),
    ]


@dataclass(frozen=True)
class Result:
    """Advantages of the policy's own tokens, by sample."""

    advantages: Nested
    returns: Nested | None
    state: AdvantageState
    summary: TrainSummary


def run(
    config: AdvantageConfig,
    samples: Sequence[Sample],
    state: AdvantageState | None = None,
    greedy: dict[str, float] | None = None,
    rows: dict[str, int] | None = None,
) -> Result:
    """`estimate` in float64; and `prepare` on the same batch agrees with it, and is 0 outside the loss mask."""
    state = state or AdvantageState()
    uids = list(dict.fromkeys(sample.uid for sample in samples))
    lengths = [sum(sample.mask) for sample in samples]

    def flat(column: str) -> torch.Tensor:
        return torch.tensor([x for sample in samples for x in sample.own(column)], dtype=torch.double)

    places = {(sample.uid, sample.index): number for number, sample in enumerate(samples)}
    partners = [places.get((sample.uid, sample.index + OWN), -1) for sample in samples]
    estimated = estimate(
        config,
        SampledTokens(
            rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.double),
            groups=torch.tensor([uids.index(sample.uid) for sample in samples]),
            lengths=torch.tensor(lengths),
            rollout_logprobs=flat("rollout"),
            old_logprobs=flat("old"),
            square_sums=flat("values"),
            ref_logprobs=flat("ref"),
            values=flat("values"),
            taught=(flat("ref"), torch.ones(sum(lengths), dtype=torch.double)),
            prompt_rows=tuple(rows[uid] for uid in uids) if rows else (),
            greedy_rewards=torch.tensor([greedy[sample.uid] for sample in samples]).double() if greedy else None,
            components={"only": torch.tensor([(sample.reward, 2.0) for sample in samples], dtype=torch.double).T},
            partners=torch.tensor(partners),
        ),
        state,
    )
    own = split(estimated.advantages.tolist(), lengths)
    keep = tuple((sample.uid, sample.index) for sample in samples)
    request = PrepareRequest(keep, state, rows or {}, greedy or {}, compared=dict.fromkeys(uids, OWN))
    summary, table = prepare(config, request, tables_of(samples))
    for sample, expected, column in zip(samples, own, table.column("advantages").to_pylist(), strict=True):
        inside = [x for x, kept in zip(column, sample.mask, strict=True) if kept]
        assert inside == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert all(x == 0.0 for x, kept in zip(column, sample.mask, strict=True) if not kept)
    assert summary.state == estimated.state
    returns = None if estimated.returns is None else split(estimated.returns.tolist(), lengths)
    return Result(own, returns, estimated.state, summary)


def split(flat: list[float], lengths: list[int]) -> Nested:
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def assert_close(got: Nested, expected: Nested, tolerance: float = 1e-9) -> None:
    assert [len(row) for row in got] == [len(row) for row in expected]
    for row, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance), f"sample {row}"


# --- Naive references: plain Python on one sample at a time ---


def token_rewards(sample: Sample, kl_coef: float, reward: float | None = None) -> list[float]:
    """r_t = -beta (log pi_old - log pi_ref), and the reward on top at the last token."""
    result = [-kl_coef * kl for kl in sample.kl]
    result[-1] += sample.reward if reward is None else reward
    return result


def to_go(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]


def whitened(nested: Nested) -> Nested:
    flat = np.array([x for row in nested for x in row])
    scale = math.sqrt(flat.var(ddof=1) + 1e-8)
    return [[(x - flat.mean()) / scale for x in row] for row in nested]


def others(samples: Sequence[Sample], me: Sample) -> list[Sample]:
    return [sample for sample in samples if sample.uid == me.uid and sample.index != me.index]


def naive_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t as the sum it is defined by (arXiv 1506.02438, eq. 16)."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def naive_n_step(rewards: list[float], values: list[float], gamma: float, k: int) -> list[float]:
    n = len(rewards)
    advantages = []
    for t in range(n):
        total = sum(gamma**step * rewards[t + step] for step in range(k) if t + step < n)
        advantages.append(total + (gamma**k * values[t + k] if t + k < n else 0.0) - values[t])
    return advantages


# --- RLOO ---


def test_leave_one_out_by_hand() -> None:
    returns, groups = torch.tensor([1.0, 0.0, 5.0, 7.0, 2.0, 4.0]), torch.tensor([0, 0, 0, 1, 2, 2])
    # Against (0 + 5) / 2, (1 + 5) / 2, (1 + 0) / 2; nobody; 4; 2.
    assert leave_one_out_advantages(returns, groups).tolist() == pytest.approx([-1.5, -3.0, 4.5, 0.0, -2.0, 2.0])
    assert leave_one_out_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("clip", [None, 1.5])
def test_rloo_compares_a_return_with_kl_to_the_others(clip: float | None) -> None:
    config = ALGORITHMS["rloo"].advantage.model_copy(update={"reward_clip": clip})
    assert config.kl_coef == 0.05
    samples = batch_of(1, (3, 4, 2, 1))

    def total(sample: Sample) -> float:
        reward = sample.reward if clip is None else max(-clip, min(clip, sample.reward))
        return reward - 0.05 * sum(sample.kl)

    expected = []
    for sample in samples:
        rest = [total(other) for other in others(samples, sample)]
        expected.append([total(sample) - sum(rest) / len(rest) if rest else 0.0] * sum(sample.mask))
    assert_close(run(config, samples).advantages, expected)


# --- REINFORCE and its kin ---


def test_returns_to_go_by_hand() -> None:
    # Two sequences: rewards 1, 2, 4 and 8; gamma 1/2.
    result = returns_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 0, 1]), 0.5)
    assert result.tolist() == pytest.approx([1 + 1 + 1, 2 + 2, 4, 8])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(numbers, max_size=8), min_size=1, max_size=6), st.floats(0, 1))
def test_returns_to_go_of_ragged_sequences(sequences: Nested, gamma: float) -> None:
    flat = torch.tensor([x for row in sequences for x in row], dtype=torch.double)
    result = returns_to_go(flat, torch.tensor([len(row) for row in sequences]), gamma)
    expected = [x for row in sequences for x in to_go(row, gamma)]
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_remax_subtracts_the_greedy_reward() -> None:
    config, samples = ALGORITHMS["remax"].advantage, batch_of(3, (1, 1, 1, 1))
    greedy = {"a": 0.5, "b": -1.0, "c": 2.0, "d": 0.0}
    # A token is credited with the whole reward and with its own KL term, not with those of later tokens.
    expected = [[s.reward - greedy[s.uid] - config.kl_coef * kl for kl in s.kl] for s in samples]
    assert_close(run(config, samples, greedy=greedy).advantages, expected)
    to_the_end = config.model_copy(update={"kl_to_go": True})
    expected = [[g - greedy[s.uid] for g in to_go(token_rewards(s, config.kl_coef), 1.0)] for s in samples]
    assert_close(run(to_the_end, samples, greedy=greedy).advantages, expected)
    with pytest.raises(ValueError, match="greedy"):
        run(config, samples)


def test_remax_by_hand() -> None:
    # KL terms 0.5 and -0.25 at 0.1 each, reward 3, greedy reward 2: 1 - 0.05 and 1 + 0.025.
    sample = Sample("a", 0, 3.0, [True, False, True], [0.0] * 3, [-1.0, 9.0, -1.0], [-1.5, 0.0, -0.75], [0.0] * 3)
    config = ALGORITHMS["remax"].advantage.model_copy(update={"kl_coef": 0.1})
    assert_close(run(config, [sample], greedy={"a": 2.0}).advantages, [[0.95, 1.025]])


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_subtracts_the_mean_of_earlier_batches_only(gamma: float) -> None:
    config = ALGORITHMS["reinforce"].advantage.model_copy(update={"gamma": gamma})
    state, earlier = AdvantageState(), []
    for seed in range(3):
        samples = batch_of(seed, (1, 1, 1))
        baseline = sum(earlier) / len(earlier) if earlier else 0.0
        result = run(config, samples, state)
        expected = [[g - baseline for g in to_go(token_rewards(sample, 0.0), gamma)] for sample in samples]
        assert_close(result.advantages, expected)
        # What the other samples of the batch earned does not move a sample's advantage.
        changed = [samples[0], *(replace(sample, reward=99.0) for sample in samples[1:])]
        assert run(config, changed, state).advantages[0] == result.advantages[0]
        earlier += [sample.reward for sample in samples]
        state = result.state
        assert (state.rewards.count, state.rewards.mean) == (len(earlier), pytest.approx(sum(earlier) / len(earlier)))


def test_reinforce_pp_is_returns_with_token_kl_whitened_over_all_tokens() -> None:
    config, samples = ALGORITHMS["reinforce_pp"].advantage, batch_of(4, (1,) * 6)
    expected = whitened([to_go(token_rewards(sample, 0.01), 1.0) for sample in samples])
    result = run(config, samples)
    assert_close(result.advantages, expected)
    flat = np.array([x for row in result.advantages for x in row])
    assert (flat.mean(), flat.var(ddof=1)) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0, abs=1e-6))


def test_reinforce_pp_baseline_is_the_group_mean_whitened_over_all_tokens() -> None:
    samples = batch_of(5)
    above = []
    for sample in samples:
        rewards = [sample.reward, *(other.reward for other in others(samples, sample))]
        above.append([sample.reward - sum(rewards) / len(rewards)] * sum(sample.mask))
    assert_close(run(ALGORITHMS["reinforce_pp_baseline"].advantage, samples).advantages, whitened(above))


# --- With a critic ---


@pytest.mark.parametrize("name", ["ppo", "ppo_penalty", "actor_critic", "actor_critic_gae"])
def test_critic_rows_with_kl_in_the_reward(name: str) -> None:
    config = ALGORITHMS[name].advantage.model_copy(update={"kl_coef": 0.1, "gamma": 0.97, "n_steps": 2})
    samples = batch_of(6)
    plain = []
    for sample in samples:
        rewards, values = token_rewards(sample, 0.1), sample.own("values")
        if config.estimator == "gae":
            plain.append(naive_gae(rewards, values, 0.97, 0.95))
        else:
            plain.append(naive_n_step(rewards, values, 0.97, 2))
    result = run(config, samples)
    assert_close(result.advantages, whitened(plain) if config.whiten else plain)
    # The critic learns advantage plus value, before any whitening.
    expected = [
        [a + v for a, v in zip(row, s.own("values"), strict=True)] for row, s in zip(plain, samples, strict=True)
    ]
    assert result.returns is not None
    assert_close(result.returns, expected)


sequences = st.lists(st.lists(st.tuples(numbers, numbers), max_size=7), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(sequences, st.floats(0, 1), st.integers(1, 12))
def test_n_step_of_ragged_sequences(batch: list[list[tuple[float, float]]], gamma: float, k: int) -> None:
    rewards = [[r for r, _ in row] for row in batch]
    values = [[v for _, v in row] for row in batch]
    flat_rewards, flat_values = (
        torch.tensor([x for row in rows for x in row], dtype=torch.double) for rows in (rewards, values)
    )
    result = n_step_advantages(flat_rewards, flat_values, torch.tensor([len(row) for row in batch]), gamma, k)
    pairs = list(zip(rewards, values, strict=True))
    expected = [x for r, v in pairs for x in naive_n_step(r, v, gamma, k)]
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-8)
    if k >= max(len(row) for row in batch):
        monte_carlo = [g - value for r, v in pairs for g, value in zip(to_go(r, gamma), v, strict=True)]
        assert result.tolist() == pytest.approx(monte_carlo, rel=1e-9, abs=1e-8)
    if k == 1:
        td = [r[t] + gamma * [*v, 0.0][t + 1] - v[t] for r, v in pairs for t in range(len(r))]
        assert result.tolist() == pytest.approx(td, rel=1e-9, abs=1e-8)


def test_n_step_by_hand() -> None:
    # Rewards 1, 2, 4, values 10, 20, 30, gamma 1/2, two steps.
    args = (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, 20.0, 30.0]), torch.tensor([3]), 0.5)
    assert n_step_advantages(*args, 2).tolist() == pytest.approx([1 + 1 + 7.5 - 10, 2 + 2 - 20, 4 - 30])
    assert n_step_advantages(*args, 1).tolist() == pytest.approx([1 + 10 - 10, 2 + 15 - 20, 4 - 30])
    assert n_step_advantages(*args, 3).tolist() == pytest.approx([1 + 1 + 1 - 10, 2 + 2 - 20, 4 - 30])


def test_ppo_max_scales_clips_whitens_and_clips() -> None:
    config = ALGORITHMS["ppo_max"].advantage.model_copy(update={"reward_clip": 1.25})
    state, seen = AdvantageState(), []
    for seed in (7, 8):
        samples = batch_of(seed)
        seen += [sample.reward for sample in samples]
        mean, std = float(np.mean(seen)), float(np.std(seen, ddof=1))
        scaled = [max(-1.25, min(1.25, (sample.reward - mean) / (std + 1e-4))) for sample in samples]
        assert 1.25 in map(abs, scaled)
        plain = [
            naive_gae(token_rewards(sample, 0.02, reward), sample.own("values"), 1.0, 0.95)
            for sample, reward in zip(samples, scaled, strict=True)
        ]
        expected = [[max(-0.5, min(0.5, a)) for a in row] for row in whitened(plain)]
        result = run(config, samples, state)
        assert_close(result.advantages, expected)
        assert 0.5 in {abs(a) for row in result.advantages for a in row}
        state = result.state


def test_rewards_scaled_over_the_batch_alone() -> None:
    config = AdvantageConfig(estimator="returns", reward_scale="batch")
    samples = [simple("a", 0, 1.0), simple("b", 0, 2.0, 2), simple("c", 0, 6.0)]
    scale = math.sqrt(7.0) + 1e-4
    state = AdvantageState(rewards=Moments().seen([100.0, 200.0]))
    assert_close(run(config, samples, state).advantages, [[-2 / scale], [-1 / scale] * 2, [3 / scale]])
    # A lone reward, and equal ones, have no spread: they become 0 and not infinite.
    assert run(config, samples[:1]).advantages == [[0.0]]
    assert run(config, [replace(sample, reward=0.1) for sample in samples]).advantages == [[0.0], [0.0, 0.0], [0.0]]


# --- Process supervision ---


def test_process_supervision_by_hand() -> None:
    """GRPO, sec. 4.1.3: the steps' rewards of a group are normalised together and added up from the token on.

    Rewards 2, 2 and 0, 0, 1: mean 1, squared deviations add up to 4, so the deviation is 1.
    """
    scale = 1 + STD_EPS
    rewards = torch.tensor([2.0, 2.0, 0.0, 0.0, 1.0], dtype=torch.double)
    ends, samples = torch.tensor([2, 3, 1, 3, 4]), torch.tensor([0, 0, 1, 1, 1])
    groups, lengths = torch.zeros(2, dtype=torch.int64), torch.tensor([3, 5])
    result = process_advantages(rewards, ends, samples, groups, lengths, normalize_by_std=True)
    # Normalised: 1, 1 and -1, -1, 0. The fifth token of the second sample stands after its last step.
    expected = [2 / scale, 2 / scale, 1 / scale, -2 / scale, -1 / scale, -1 / scale, 0.0, 0.0]
    assert result.tolist() == pytest.approx(expected)
    unscaled = process_advantages(rewards, ends, samples, groups, lengths, normalize_by_std=False)
    assert unscaled.tolist() == pytest.approx([2, 2, 1, -2, -1, -1, 0, 0])


def test_process_supervision_reaches_the_table_around_a_hole() -> None:
    """The steps above; text between them is not the policy's, and one step ends within it."""
    holes = [[True, False, False, True, True], [True, False, True, True, True, False, True]]
    spans = [[(4, 2.0), (5, 2.0)], [(2, 0.0), (4, 0.0), (6, 1.0)]]
    samples = []
    for index in range(2):
        zeros = [0.0] * len(holes[index])
        # The outcome's reward plays no part.
        samples.append(Sample("a", index, 7.0 * index, holes[index], zeros, zeros, zeros, zeros, spans[index]))
    request = PrepareRequest((("a", 0), ("a", 1)))
    summary, table = prepare(ALGORITHMS["grpo"].advantage, request, tables_of(samples))
    scale = 1 + STD_EPS
    # Ends count the policy's own tokens: 2 and 3; 1 (before the hole), 3 and 4.
    expected = [[2, 0, 0, 2, 1], [-2, 0, -1, -1, 0, 0, 0]]
    for row, numbers_by_hand in zip(table.column("advantages").to_pylist(), expected, strict=True):
        assert row == pytest.approx([x / scale for x in numbers_by_hand])
    assert [row.has_signal for row in summary.rows] == [True, True]


def test_equal_step_rewards_carry_no_signal() -> None:
    rewards, ends = torch.full((3,), 0.1, dtype=torch.double), torch.tensor([1, 2, 1])
    result = process_advantages(
        rewards, ends, torch.tensor([0, 0, 1]), torch.tensor([0, 0]), torch.tensor([2, 1]), True
    )
    assert result.tolist() == [0.0, 0.0, 0.0]


# --- DCPO ---


def test_smooth_standardisation_over_three_visits_by_hand() -> None:
    """DCPO, sec. 3.2, with two samples each time: rewards 1, 0; then 1, 1; then 0, 1."""
    config, state, rows = ALGORITHMS["dcpo"].advantage, AdvantageState(), {"a": 17}

    def visit(first: float, second: float) -> list[float]:
        nonlocal state
        result = run(config, [simple("a", 0, first, 2), simple("a", 1, second)], state, rows=rows)
        state = state.after(result.state)
        assert result.advantages[0][0] == result.advantages[0][1]
        return [result.advantages[0][0], result.advantages[1][0]]

    # First visit: this visit is all there is. Mean 1/2, deviation sqrt(1/2).
    now = 0.5 / (math.sqrt(0.5) + STD_EPS)
    assert visit(1.0, 0.0) == pytest.approx([now, -now])
    # Second: A_now = 0. All four: mean 3/4, variance 3/4 / 3 = 1/4. Both mixtures are A_total / 2.
    assert visit(1.0, 1.0) == pytest.approx([0.5 * 0.25 / (0.5 + STD_EPS)] * 2)
    # Third: all six have mean 2/3, variance 4/3 / 5 = 4/15; weights 2/3 and 1/3.
    deviation = math.sqrt(4 / 15) + STD_EPS
    low_total, high_total = -(2 / 3) / deviation, (1 / 3) / deviation
    low = (-2 * now + low_total) / 3  # -0.902, nearer to 0 than -1.096
    high = (now + 2 * high_total) / 3  # 0.666, nearer to 0 than 0.686
    assert abs(low) < abs(-now + 2 * low_total) / 3 and abs(high) < abs(2 * now + high_total) / 3
    assert visit(0.0, 1.0) == pytest.approx([low, high])
    history = state.prompts[17]
    assert (history.visits, history.rewards.count, history.rewards.mean) == (3, 6, pytest.approx(2 / 3))
    # Equal rewards at a later visit i: A_total / i (end of sec. 3.2).
    all_rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    total = (1 - np.mean(all_rewards)) / (np.std(all_rewards, ddof=1) + STD_EPS)
    assert visit(1.0, 1.0) == pytest.approx([total / 4] * 2)


def test_a_prompt_that_never_varied_gives_nothing() -> None:
    config, state = ALGORITHMS["dcpo"].advantage, AdvantageState()
    for _ in range(3):
        result = run(config, [simple("a", 0, 0.1), simple("a", 1, 0.1)], state, rows={"a": 3})
        assert result.advantages == [[0.0], [0.0]]
        state = state.after(result.state)
    assert state.prompts[3].visits == 3


def test_prompts_do_not_share_their_history() -> None:
    config = ALGORITHMS["dcpo"].advantage
    first = run(config, [simple("a", 0, 1.0), simple("a", 1, 0.0)], rows={"a": 5})
    mixed = [simple("b", 0, 1.0), simple("b", 1, 1.0), simple("c", 0, 1.0), simple("c", 1, 1.0)]
    # Prompt 5 was seen before under another uid; prompt 6 was not.
    second = run(config, mixed, first.state, rows={"b": 5, "c": 6})
    assert second.advantages[0][0] == second.advantages[1][0] > 0.1
    assert second.advantages[2:] == [[0.0], [0.0]]


def test_part_of_a_state_is_sent_and_merged_back() -> None:
    histories = {row: PromptHistory(visits=row, rewards=Moments().seen([float(row)])) for row in (1, 2, 3)}
    state = AdvantageState(kl_coef=0.5, rewards=Moments().seen([1.0, 2.0]), prompts=histories)
    part = state.of_rows([2, 9])
    assert part == AdvantageState(kl_coef=0.5, rewards=state.rewards, prompts={2: histories[2]})
    newer = {2: PromptHistory(visits=7), 9: PromptHistory(visits=1)}
    changed = part.model_copy(update={"prompts": newer, "kl_coef": 0.25, "rewards": Moments().seen([3.0])})
    whole = state.after(changed)
    assert whole == AdvantageState(
        kl_coef=0.25, rewards=Moments().seen([3.0]), prompts={1: histories[1], 3: histories[3], **newer}
    )
    assert state.prompts == histories, "a state is a value"
    assert AdvantageState.model_validate_json(whole.model_dump_json()) == whole


# --- RAFT and distillation ---


@pytest.mark.parametrize(("solved", "samples", "k"), [(1, 8, 4), (3, 8, 2), (6, 8, 4), (2, 5, 4)])
def test_pass_at_k_is_its_closed_form_on_rewards_of_0_and_1(solved: int, samples: int, k: int) -> None:
    """arXiv 2508.10751: with the share rho of subsets that solve the prompt and the deviation s of their reward,
    (1 - rho) / s for a right answer and (1 - rho - P(no right one beside it)) / s for a wrong one."""
    rewards = torch.tensor([1.0] * solved + [0.0] * (samples - solved))
    wrong = samples - solved
    rho = 1 - math.comb(wrong, k) / math.comb(samples, k)
    scale = math.sqrt(rho * (1 - rho)) + STD_EPS
    failed = math.comb(wrong - 1, k - 1) / math.comb(samples - 1, k - 1)
    expected = [(1 - rho) / scale] * solved + [(1 - rho - failed) / scale] * wrong
    found = best_of_subsets_advantages(rewards, torch.zeros(samples, dtype=torch.int64), k)
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-9)


@given(st.integers(0, 2**31), st.floats(1e-4, 1.0), st.booleans())
@settings(max_examples=40, deadline=None)
def test_covariant_tokens_are_the_highest_products_within_the_bounds(seed: int, share: float, bounded: bool) -> None:
    rng = np.random.default_rng(seed)
    advantages, logprobs = rng.normal(size=30), -np.abs(rng.normal(size=30) * 2)
    among = rng.random(30) < 0.8
    among[0] = True
    bounds = (0.5, 3.0) if bounded else (-math.inf, math.inf)
    numbers_of = [n for n in range(30) if among[n]]
    means = [sum(float(column[n]) for n in numbers_of) / len(numbers_of) for column in (advantages, logprobs)]
    products = {n: float((advantages[n] - means[0]) * (logprobs[n] - means[1])) for n in numbers_of}
    order = sorted((n for n in numbers_of if bounds[0] < products[n] < bounds[1]), key=lambda n: -products[n])
    given_ = (torch.tensor(advantages), torch.tensor(logprobs), torch.tensor(among))
    found = covariant_tokens(*given_, share, bounds).nonzero().flatten().tolist()
    assert found == sorted(order[: max(int(share * len(numbers_of)), 1)])


def test_dropped_tokens_have_no_advantage_and_penalized_ones_keep_it() -> None:
    samples, grpo = batch_of(21), ALGORITHMS["grpo"].advantage
    plain = run(grpo, samples).advantages
    given_ = {"covariance": "drop", "cov_share": 0.2, "cov_low": 0.0}
    dropped = run(AdvantageConfig.model_validate(dict(grpo) | given_), samples).advantages
    changed = [
        (a, b) for one, other in zip(plain, dropped, strict=True) for a, b in zip(one, other, strict=True) if a != b
    ]
    assert changed and {b for _, b in changed} == {0.0}
    penalized = ALGORITHMS["kl_cov"].advantage.model_copy(update={"cov_penalty": 3.0, "cov_share": 0.2})
    assert run(penalized, samples).advantages == plain
    keep = tuple((sample.uid, sample.index) for sample in samples)
    _, table = prepare(penalized, PrepareRequest(keep), tables_of(samples))
    coefficients = [x for row in table.column("penalties").to_pylist() for x in row]
    tokens = sum(sum(sample.mask) for sample in samples)
    assert set(coefficients) == {0.0, 3.0} and coefficients.count(3.0) == int(0.2 * tokens)


def test_groups_without_two_subsets_have_no_pass_at_k() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.3, 0.3, 0.3]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert best_of_subsets_advantages(rewards, groups, 3).tolist() == [0.0] * 6
    assert best_of_subsets_advantages(rewards, groups, 2)[3:].tolist() == [0.0] * 3


def test_maxrl_weighs_the_rare_success_by_hand() -> None:
    rewards, groups = (
        torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        torch.tensor([0] * 4 + [1] * 4 + [2] * 2),
    )
    expected = [3.0, -1.0, -1.0, -1.0, *[1 / 3] * 3, -1.0, 0.0, 0.0]
    assert max_likelihood_advantages(rewards, groups).tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"rewards of 0 or more, got -0\.5"):
        max_likelihood_advantages(rewards - 0.5, groups)


def test_pass_at_k_is_the_same_for_rewards_below_zero() -> None:
    """The mean and the deviation of the best rewards shift with them."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.25, 0.0, 0.5, 2.0]).double(), torch.zeros(6, dtype=torch.int64)
    expected = best_of_subsets_advantages(rewards, groups, 3)
    torch.testing.assert_close(best_of_subsets_advantages(rewards - 1.0, groups, 3), expected)
    assert expected[5] > 0 > expected[1]


def test_best_of_group_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 3.0, -1.0, -2.0, 0.0]), torch.tensor([0, 0, 0, 2, 2, 1])
    # Six samples, three groups of different sizes: each best sample weighs the same.
    assert best_of_group(rewards, groups).tolist() == [0.0, 2.0, 0.0, 2.0, 0.0, 2.0]
    # A group whose samples were all dropped has no number.
    assert best_of_group(rewards[:5], groups[:5]).tolist() == [0.0, 2.5, 0.0, 2.5, 0.0]
    assert best_of_group(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_raft_credits_every_token_of_the_best_sample() -> None:
    samples = batch_of(9)
    expected = []
    for sample in samples:
        rest = others(samples, sample)
        best = all(sample.reward > other.reward for other in rest)
        expected.append([len(samples) / 3 if best else 0.0] * sum(sample.mask))
    result = run(ALGORITHMS["raft"].advantage, samples)
    assert result.advantages == expected
    assert sum(row.has_signal for row in result.summary.rows) == 3


def test_online_dpo_has_the_gradient_of_dpo_on_the_best_and_the_worst_sample() -> None:
    """In a batch's first update, in float64; a group of equal rewards has no pair."""
    lengths, groups = torch.tensor([2, 3, 1, 2, 4, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    rewards = torch.tensor([0.2, 0.9, -1.0, 0.1, 0.4, 0.5, 0.5])
    sequence, tokens = torch.repeat_interleave(torch.arange(7), lengths), int(lengths.sum())
    logprobs = (-torch.rand(tokens, dtype=torch.double)).requires_grad_()
    reference = -torch.rand(tokens, dtype=torch.double)
    batch = SampledTokens(
        rewards=rewards,
        groups=groups,
        lengths=lengths,
        rollout_logprobs=logprobs.detach(),
        old_logprobs=logprobs.detach(),
        ref_logprobs=reference,
        values=None,
    )
    row = ALGORITHMS["online_dpo"]
    config = row.advantage.model_copy(update={"dpo_beta": 0.7})
    advantages = estimate(config, batch, AdvantageState()).advantages
    assert not advantages[sequence >= 5].any() and not advantages[sequence == 0].any()
    (found,) = torch.autograd.grad(-(advantages * (logprobs - logprobs.detach()).exp()).sum() / 7, logprobs)
    ratios = torch.zeros(7, dtype=torch.double).index_add(0, sequence, logprobs - reference)
    leads = torch.stack([ratios[1] - ratios[2], ratios[4] - ratios[3]])
    (expected,) = torch.autograd.grad(-torch.sigmoid(0.7 * leads).log().sum() / 3, logprobs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("coef", [0.0, 0.3, 1.0])
def test_a_large_group_has_the_win_rate_against_the_mixture(coef: float) -> None:
    """Nash-MD's opponent is a sample of policy^(1 - coef) reference^coef; the group has the policy's samples."""
    policy, reference = (torch.tensor(p, dtype=torch.double) for p in ([0.5, 0.3, 0.2], [0.1, 0.2, 0.7]))
    rewards, generator = torch.tensor([1.0, 3.0, 3.0]), torch.Generator().manual_seed(3)
    drawn = torch.multinomial(policy, 4000, replacement=True, generator=generator)
    ratios = (policy / reference).log()[drawn]
    found, opponents = mixture_win_rates(rewards[drawn], torch.zeros(4000, dtype=torch.long), ratios, coef)
    mixture = policy ** (1 - coef) * reference**coef
    won = 0.5 + 0.5 * (rewards[:, None] - rewards).sign().double()
    torch.testing.assert_close(found, (won @ (mixture / mixture.sum()))[drawn], rtol=0.0, atol=0.02)
    counted = 4000 * (policy @ (mixture / policy)) ** 2 / (policy @ (mixture / policy).square())
    assert opponents == pytest.approx(float(counted), rel=0.05)


def test_nash_md_says_how_many_samples_of_a_group_are_opponents() -> None:
    result = run(ALGORITHMS["nash_md"].advantage, batch_of(10))
    assert 1.0 <= result.summary.metrics["effective_opponents"] <= 9.0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.advantage.estimator != "distill"])
def test_an_advantage_that_needs_the_log_probs_before_the_update_says_so(name: str, kl_coef: float) -> None:
    """The run computes them if it does. Distillation can use the sampler's instead."""
    config = ALGORITHMS[name].advantage
    if config.kl_coef:
        config = config.model_copy(update={"kl_coef": kl_coef})
    tokens = -torch.rand(6, dtype=torch.double)
    batch = SampledTokens(
        rewards=torch.tensor([1.0, 2.0, 0.5, 1.0]),
        groups=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([2, 1, 2, 1]),
        rollout_logprobs=tokens,
        old_logprobs=None,
        ref_logprobs=tokens,
        values=tokens,
        square_sums=tokens.exp(),
        prompt_rows=(4, 7),
        greedy_rewards=torch.ones(4),
        components={"a": torch.ones(2, 4)},
        partners=torch.tensor([1, -1, 3, -1]),
    )
    try:
        estimate(config, batch, AdvantageState())
    except ValueError as error:
        assert "old_logprobs" in str(error) and config.reads_old_logprobs
    else:
        assert not config.reads_old_logprobs


def test_lone_samples_and_equal_rewards_neither_win_nor_lose() -> None:
    rewards, groups = torch.tensor([2.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 1, 1])
    wins, opponents = mixture_win_rates(rewards, groups, torch.tensor([9.0, 1.0, -1.0, 400.0]), 0.5)
    assert wins.tolist() == [0.5] * 4 and 1.0 <= opponents <= 2.0
    assert mixture_win_rates(rewards[:1], groups[:1], rewards[:1], 0.5)[1] == 0.0


def test_distill_is_log_teacher_minus_log_policy() -> None:
    samples, config = batch_of(10), ALGORITHMS["distill"].advantage
    expected = [
        [teacher - policy for teacher, policy in zip(sample.own("ref"), sample.own("old"), strict=True)]
        for sample in samples
    ]
    assert_close(run(config, samples).advantages, expected)
    keep = tuple((sample.uid, sample.index) for sample in samples)
    rollouts, rewards, _, ref, _ = tables_of(samples)
    # Without a trainer's own log-probs the sampler's are the policy's.
    _, table = prepare(config, PrepareRequest(keep), [rollouts, rewards, ref])
    for sample, row in zip(samples, table.column("advantages").to_pylist(), strict=True):
        gap = [(t - p) * m for t, p, m in zip(sample.ref, sample.rollout, sample.mask, strict=True)]
        assert row == pytest.approx(gap, rel=1e-6, abs=1e-6)
    with pytest.raises(ValueError, match="teacher"):
        prepare(config, PrepareRequest(keep), [rollouts, rewards])


# --- The steered coefficient ---


def test_adaptive_coefficient_by_hand() -> None:
    config = AdvantageConfig(estimator="returns", kl_coef=0.1, kl_target=6.0, kl_horizon=1000)
    # e = 6.6 / 6 - 1 = 0.1, and the two ends at +-0.2; 50 samples of a horizon of 1000.
    assert steered_kl_coef(0.1, 6.6, config, 50) == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    assert steered_kl_coef(0.1, 60.0, config, 50) == pytest.approx(0.1 * 1.01)
    assert steered_kl_coef(0.1, -3.0, config, 50) == pytest.approx(0.1 * 0.99)
    assert steered_kl_coef(0.1, 6.0, config, 50) == pytest.approx(0.1)
    assert steered_kl_coef(0.1, 60.0, config.model_copy(update={"kl_target": None}), 50) == 0.1


@given(
    coefs=st.floats(1e-6, 1e3), kl=st.floats(-1e6, 1e6), horizon=st.integers(1, 10_000), samples=st.integers(1, 100_000)
)
def test_a_batch_changes_the_coefficient_by_a_fifth_at_most(
    coefs: float, kl: float, horizon: int, samples: int
) -> None:
    """Also where the batch is larger than the horizon: 128 samples of 20 would give a factor of -0.28."""
    config = AdvantageConfig(estimator="returns", kl_coef=coefs, kl_target=6.0, kl_horizon=horizon)
    after = steered_kl_coef(coefs, kl, config, samples)
    assert 0.8 * coefs * (1 - 1e-12) <= after <= 1.2 * coefs * (1 + 1e-12)
    if samples <= horizon:
        error = max(-0.2, min(0.2, kl / 6.0 - 1))
        assert after == pytest.approx(coefs * (1 + error * samples / horizon))


def test_a_coefficient_comes_back_from_any_number_of_batches_beside_the_target() -> None:
    """2^30 is the farthest: 0.8^94 and 1.2^115 are beyond. What was left at 0 or below comes back too."""
    config = AdvantageConfig(estimator="returns", kl_coef=0.1, kl_target=6.0, kl_horizon=1)
    low = high = 0.1
    for _ in range(5000):
        low, high = steered_kl_coef(low, 0.0, config, 1), steered_kl_coef(high, 60.0, config, 1)
    assert (low, high) == (pytest.approx(0.1 / 2**30), pytest.approx(0.1 * 2**30))
    for broken in (low, 0.0, -0.3):
        back = broken
        for _ in range(117):
            back = steered_kl_coef(back, 60.0, config, 1)
        assert back > 0.1
    penalty, state = KlPenalty(coef=2.0, target=0.03), PenaltyState(kl_old_coef=2.0)
    for _ in range(1100):
        state = state.after_updates(0.0, penalty)
    assert state.kl_old_coef == 2.0 / 2**30
    for _ in range(1200):
        state = state.after_updates(1.0, penalty)
    assert state.kl_old_coef == 2.0 * 2**30


def test_the_adapted_coefficient_is_used_from_the_next_batch_on() -> None:
    config = AdvantageConfig(estimator="returns", kl_coef=0.1, kl_target=0.5, kl_horizon=10)
    state, coef = AdvantageState(), 0.1
    for seed in range(3):
        samples = batch_of(seed)
        result = run(config, samples, state)
        assert_close(result.advantages, [to_go(token_rewards(sample, coef), 1.0) for sample in samples])
        assert result.summary.metrics["kl_coef"] == pytest.approx(coef)
        # The divergence of a response is the sum over its tokens; the batch's is the mean of those.
        kl = sum(sum(sample.kl) for sample in samples) / len(samples)
        coef *= 1 + max(-0.2, min(0.2, kl / 0.5 - 1)) * len(samples) / 10
        state = state.after(result.state)
        assert state.kl_coef == pytest.approx(coef)


def test_an_adapted_coefficient_starts_again_where_the_configured_one_has_changed() -> None:
    """A resumed run may have a new one. The state of an earlier version does not say what it started from."""
    config = AdvantageConfig(estimator="returns", kl_coef=0.1, kl_target=0.5, kl_horizon=1000)
    adapted = run(config, batch_of(1), AdvantageState()).state
    assert adapted.kl_coef != 0.1 and adapted.kl_start == 0.1

    def used(state: AdvantageState, coef: float) -> float:
        changed = config.model_copy(update={"kl_coef": coef})
        return run(changed, batch_of(2), state).summary.metrics["kl_coef"]

    assert used(adapted, 0.1) == adapted.kl_coef
    assert used(adapted, 0.7) == 0.7
    assert used(adapted.model_copy(update={"kl_start": None}), 0.1) == adapted.kl_coef
    constant = run(config.model_copy(update={"kl_target": None}), batch_of(2), adapted).state
    assert (constant.kl_coef, constant.kl_start) == (None, None)


def test_a_coefficient_below_zero_in_an_old_checkpoint_is_not_used() -> None:
    config = AdvantageConfig(estimator="returns", kl_coef=0.1, kl_target=0.5, kl_horizon=10)
    result = run(config, batch_of(1), AdvantageState(kl_coef=-0.3))
    assert result.summary.metrics["kl_coef"] == pytest.approx(0.1 / 2**30)


# --- What the controller remembers ---


def test_penalty_coefficient_follows_the_divergence() -> None:
    """PPO, sec. 4: d < target / 1.5 halves the coefficient, d > 1.5 target doubles it."""
    penalty = KlPenalty(coef=1.0, target=0.03)
    memory = PenaltyState(kl_old_coef=0.8, kl_old_start=1.0)
    for divergence, expected in ((0.0199, 0.4), (0.0201, 0.8), (0.03, 0.8), (0.0449, 0.8), (0.0451, 1.6), (0.0, 0.4)):
        after = memory.after_updates(divergence, penalty)
        assert after == memory.model_copy(update={"kl_old_coef": expected}), divergence
    twice = memory.after_updates(1.0, penalty).after_updates(1.0, penalty)
    assert twice.kl_old_coef == pytest.approx(3.2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, allow_nan=False), max_size=12), max_size=5))
def test_moments_are_numpys_whatever_the_parts(parts: Nested) -> None:
    moments = Moments()
    for part in parts:
        moments = moments.seen(part)
    values = np.array([x for part in parts for x in part])
    assert moments.count == len(values)
    scale = float(np.abs(values).max()) if len(values) else 0.0
    assert moments.mean == pytest.approx(float(values.mean()) if len(values) else 0.0, rel=1e-9, abs=1e-12 * scale)
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    assert moments.std == pytest.approx(spread, rel=1e-6, abs=1e-9 * scale)
    assert Moments().seen(values.tolist()) == moments


def test_moments_of_large_close_numbers_keep_their_digits() -> None:
    assert Moments().seen([1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16]).std == pytest.approx(math.sqrt(30.0))
    assert Moments().seen([0.1] * 1000).std == 0.0


# --- What holds of every row of the table ---

GREEDY = {"a": 0.5, "b": -1.0, "c": 2.0}
ROWS = {"a": 4, "b": 2, "c": 9}
STATE = AdvantageState(
    rewards=Moments().seen([1.0, 3.0]), prompts={4: PromptHistory(visits=2, rewards=Moments().seen([0.0, 1.0, 4.0]))}
)


def run_row(name: str, samples: Sequence[Sample]) -> Result:
    return run(ALGORITHMS[name].advantage, samples, STATE, GREEDY, ROWS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"rae"}))  # a moving average goes from sample to sample
def test_order_of_samples_does_not_matter(name: str) -> None:
    samples = batch_of(11)
    expected = run_row(name, samples)
    order = list(range(len(samples)))
    random.Random(1).shuffle(order)
    shuffled = run_row(name, [samples[row] for row in order])
    assert_close(shuffled.advantages, [expected.advantages[row] for row in order])
    assert shuffled.state.rewards.mean == pytest.approx(expected.state.rewards.mean)
    for row, history in expected.state.prompts.items():
        other = shuffled.state.prompts[row]
        assert (other.visits, other.rewards.count) == (history.visits, history.rewards.count)
        assert (other.rewards.mean, other.rewards.std) == pytest.approx((history.rewards.mean, history.rewards.std))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_tokens_outside_the_loss_mask_have_no_effect(name: str) -> None:
    """What stands outside the loss mask changes no advantage; `run` checks that it gets 0."""
    samples = batch_of(12)
    assert not all(all(sample.mask) for sample in samples)
    poisoned = []
    for sample in samples:
        columns = {
            column: [x if inside else 1e3 for x, inside in zip(getattr(sample, column), sample.mask, strict=True)]
            for column in ("rollout", "old", "ref", "values")
        }
        poisoned.append(replace(sample, **columns))
    assert run_row(name, poisoned).advantages == run_row(name, samples).advantages


@pytest.mark.parametrize("name", ALGORITHMS)
def test_partition_of_tables_does_not_matter(name: str) -> None:
    samples = batch_of(13)
    keep = tuple((sample.uid, sample.index) for sample in samples)
    request = PrepareRequest(keep, STATE, ROWS, GREEDY, compared=dict.fromkeys(ROWS, OWN))
    config, tables = ALGORITHMS[name].advantage, tables_of(samples)
    expected, expected_table = prepare(config, request, tables)
    for seed in range(3):
        rng = random.Random(seed)
        pieces = []
        for table in tables:
            cuts = [0, *sorted(rng.sample(range(1, len(samples)), 3)), len(samples)]
            pieces += [table.slice(start, end - start) for start, end in pairwise(cuts)]
        rng.shuffle(pieces)
        summary, table = prepare(config, request, pieces)
        assert summary == expected and table.equals(expected_table)


COMPARING = ["grpo", "dr_grpo", "maxrl", "rloo", "reinforce_pp_baseline"]
"""Rows that judge a sample by its group; dapo, gspo, gspo_token, gmpo, sapo and cispo have grpo's advantages."""


def test_rows_with_the_advantages_of_grpo() -> None:
    same = [name for name, row in ALGORITHMS.items() if row.advantage == ALGORITHMS["grpo"].advantage]
    assert same == ["grpo", "dapo", "gspo", "gspo_token", "gmpo", "sapo", "cispo"]


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_equal_rewards_gets_exactly_zero(name: str) -> None:
    config = ALGORITHMS[name].advantage.model_copy(update={"kl_coef": 0.0, "whiten": False})
    # Three times 0.1 does not add up to 0.3 in binary.
    samples = [replace(sample, reward=0.1) if sample.uid == "a" else sample for sample in batch_of(14)]
    result = run(config, samples)
    for sample, row in zip(samples, result.advantages, strict=True):
        assert all((x == 0.0) == (sample.uid == "a") for x in row)
    assert [row.has_signal for row in result.summary.rows] == [sample.uid != "a" for sample in samples]


@pytest.mark.parametrize("name", COMPARING)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_advantages_of_a_group_sum_to_zero(name: str, seed: int, sizes: list[int]) -> None:
    samples = batch_of(seed, sizes)
    config = ALGORITHMS[name].advantage.model_copy(update={"whiten": False})
    advantages = run(config, samples).advantages
    pairs = zip(samples, advantages, strict=True)
    for uid, members in groupby(pairs, key=lambda pair: pair[0].uid):
        rows = [row for _, row in members]
        assert all(len(set(row)) == 1 for row in rows), "one advantage for the whole response"
        assert sum(row[0] for row in rows) == pytest.approx(0.0, abs=1e-7), uid


@pytest.mark.parametrize("name", [name for name in COMPARING if name != "maxrl"])
def test_a_shift_of_all_rewards_changes_nothing(name: str) -> None:
    samples = batch_of(15)
    moved = [replace(sample, reward=sample.reward + 3.0) for sample in samples]
    config = ALGORITHMS[name].advantage
    assert_close(run(config, moved).advantages, run(config, samples).advantages, 1e-6)


# Statistics within the sources of a mixture


def two_sources(rewards: list[float], *, sources: tuple[str, ...] = ("a", "b", "a", "b")) -> SampledTokens:
    """Four samples of one token each, in separate groups."""
    return SampledTokens(
        rewards=torch.tensor(rewards, dtype=torch.double),
        groups=torch.arange(4),
        lengths=torch.ones(4, dtype=torch.int64),
        rollout_logprobs=torch.zeros(4),
        old_logprobs=None,
        ref_logprobs=None,
        values=None,
        sources=sources,
    )


def test_whitening_is_done_within_each_source() -> None:
    config = AdvantageConfig(estimator="returns", whiten=True)
    found = estimate(config, two_sources([1.0, 100.0, 3.0, 300.0]), AdvantageState()).advantages
    # 1 and 3 have mean 2 and an unbiased deviation of sqrt(2), 100 and 300 are the same in hundreds.
    half = 2**-0.5
    assert found.tolist() == pytest.approx([-half, -half, half, half], rel=1e-6)
    mixed = estimate(config, two_sources([1.0, 100.0, 3.0, 300.0], sources=()), AdvantageState()).advantages
    assert mixed.tolist() != pytest.approx(found.tolist(), rel=0.1)


@pytest.mark.parametrize("scale", ["batch", "running"])
def test_rewards_are_scaled_within_each_source(scale: Any) -> None:
    config = AdvantageConfig(estimator="returns", reward_scale=scale)
    before = AdvantageState(sources={"b": SourceMoments(rewards=Moments().seen([100.0, 300.0]))})
    found = estimate(config, two_sources([1.0, 100.0, 3.0, 300.0]), before)
    seen = Moments().seen([100.0, 300.0] * (2 if scale == "running" else 1))
    of_b = [(reward - 200.0) / (seen.std + 1e-4) for reward in (100.0, 300.0)]
    of_a = [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)]
    expected = [of_a[0], of_b[0], of_a[1], of_b[1]]
    assert found.advantages.tolist() == pytest.approx(expected)
    assert found.state.sources["a"].rewards == Moments().seen([1.0, 3.0])
    assert found.state.sources["b"].rewards.count == 4
    assert found.state.rewards == Moments()


def test_the_running_mean_is_that_of_the_source() -> None:
    config = AdvantageConfig(estimator="returns", baseline="running_mean")
    first = estimate(config, two_sources([1.0, 100.0, 3.0, 300.0]), AdvantageState())
    assert first.advantages.tolist() == [1.0, 100.0, 3.0, 300.0]
    state = AdvantageState.model_validate_json(first.state.model_dump_json())  # as a checkpoint keeps it
    second = estimate(config, two_sources([4.0, 150.0, 5.0, 250.0]), state)
    assert second.advantages.tolist() == [2.0, -50.0, 3.0, 50.0]
    # A batch without a source leaves its statistics as they are.
    third = estimate(config, two_sources([0.0] * 4, sources=("a",) * 4), second.state)
    assert third.state.sources["b"] == second.state.sources["b"]


def test_the_batchs_mean_is_that_of_the_source() -> None:
    config = AdvantageConfig(estimator="returns", baseline="batch_mean", reward_to_go=False)
    found = estimate(config, two_sources([1.0, 100.0, 3.0, 300.0]), AdvantageState())
    assert found.advantages.tolist() == [-1.0, -100.0, 1.0, 100.0]
    whole = estimate(config, two_sources([1.0, 100.0, 3.0, 300.0], sources=()), AdvantageState())
    assert whole.advantages.tolist() == [-100.0, -1.0, -98.0, 199.0]


def test_role_conditioned_advantages_are_a_loop_over_the_samples() -> None:
    """RAE as its code has it, in float64, over two batches with a checkpoint between them; by source and player."""
    config = ALGORITHMS["rae"].advantage
    rng, state, averages = np.random.default_rng(5), AdvantageState(), dict[tuple[str, str], float]()
    for _ in range(2):
        batch = two_sources([float(reward) for reward in rng.normal(size=4)])
        batch = replace(batch, players=("white", "white", "black", "black"))
        expected = []
        for key, reward in zip(zip(batch.sources, batch.players, strict=True), batch.rewards.tolist(), strict=True):
            before = averages.get(key, 0.0)
            expected.append(reward - before)
            averages[key] = 0.95 * before + (1 - 0.95) * reward
        found = estimate(config, batch, state)
        assert found.advantages.tolist() == pytest.approx(expected, abs=1e-15)
        state = AdvantageState.model_validate_json(found.state.model_dump_json())
    assert len(averages) == 4
    kept = {(source, player): value for source, own in state.players.items() for player, value in own.items()}
    assert kept == averages


def test_comparisons_within_groups_do_not_depend_on_sources() -> None:
    batch = replace(two_sources([1.0, 2.0, 4.0, 9.0]), groups=torch.tensor([0, 0, 1, 1]))
    for name in ("grpo", "rloo"):
        config = ALGORITHMS[name].advantage.model_copy(update={"kl_coef": 0.0})
        alone = estimate(config, replace(batch, sources=()), AdvantageState()).advantages
        within = estimate(config, replace(batch, sources=("a", "a", "b", "b")), AdvantageState()).advantages
        assert within.tolist() == alone.tolist()


def test_prepare_passes_the_source_of_every_sample() -> None:
    samples = batch_of(0, (1, 1, 1))
    config = AdvantageConfig(estimator="returns", reward_scale="batch")
    sources = {sample.uid: f"s{number % 2}" for number, sample in enumerate(samples)}
    keep = tuple((sample.uid, sample.index) for sample in samples)
    summary, _ = prepare(config, PrepareRequest(keep, sources=sources), tables_of(samples))
    counts = {name: own.rewards.count for name, own in summary.state.sources.items()}
    assert counts == {"s0": 2, "s1": 1}

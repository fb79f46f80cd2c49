"""Samples of several rows: an episode whose history was rewritten trains as one sequence of its sampled tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev

import pyarrow as pa
import pytest
import torch

from tests.workers.algorithms.test_train_batch import reward_table, rollout_table, scores, with_components
from tests.workers.algorithms.test_truncated import Sample, exact_logprobs, loss_of, small_model
from troupe.orchestrator.algorithms.section import AlgorithmConfig, advantage, policy_loss
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.training.micro_batches import minibatches, plan_update, sample_rows
from troupe.workers.algorithms import policy_loss as losses
from troupe.workers.algorithms.policy_loss import policy_tokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.messages import SQUARE_SUMS, PrepareRequest, RankPlan, TrainSummary
from troupe.workers.models.token_batch import TokenTable

Key = tuple[str, int]
SAMPLES: dict[Key, tuple[float, list[list[bool]]]] = {
    ("p", 0): (1.0, [[True, True, True]]),
    ("p", 1): (0.0, [[True, True], [True], [False, True, True, True]]),
    ("p", 2): (0.5, [[True], [False, False], [True, True]]),
    ("q", 0): (2.0, [[True, True, False, True, True]]),
    ("q", 1): (2.0, [[True] * 4, [True]]),
    ("q", 2): (0.25, [[True, True]]),
}
"""Reward of each sample, and the loss mask of each of its rows."""
MAX_TOKENS = 9


@dataclass(frozen=True)
class Layout:
    """How an update is divided."""

    ranks: int = 1
    budget: int = 4096
    packed: bool = False
    shared: bool = False
    parts: int = 1


@cache
def tokens_of(key: Key, seed: int = 0) -> dict[str, list[float]]:
    """Random numbers for each token of a sample, in the order of its rows."""
    count = sum(len(row) for row in SAMPLES[key][1])
    generator = torch.Generator().manual_seed(seed + hash_of(key))

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator)

    old = -noise(1.0).abs() - 0.1
    columns = {"old": old, "new": old + noise(0.3), "rollout": old + noise(0.2), "ref": old + noise(0.3)}
    columns["squares"] = old.exp().square() + noise(0.1).square()
    return {name: values.tolist() for name, values in columns.items()}


def hash_of(key: Key) -> int:
    """A seed for the sample."""
    return 100 * "pq".index(key[0]) + key[1]


def rows_of(forked: bool) -> list[tuple[Key, int, slice]]:
    """(sample, segment, its tokens) of every row: as they were sampled, or each sample as one row."""
    rows = []
    for key, (_, masks) in SAMPLES.items():
        start = 0
        for segment, mask in enumerate(masks if forked else [[token for row in masks for token in row]]):
            rows.append((key, segment, slice(start, start + len(mask))))
            start += len(mask)
    return rows


def prompt_of(segment: int) -> list[int]:
    """The rows of a group start with one prompt, and a rewritten history is another."""
    return [1, 2, 3, *[9] * segment]


def prepared(
    config: AlgorithmConfig, forked: bool, moved: bool, old: Mapping[Key, list[float]] | None = None
) -> tuple[TrainSummary, pa.Table]:
    """The batch; `old`: old log-probs of every sample instead of random ones."""
    rows = rows_of(forked)
    given = {key: tokens_of(key) | ({} if old is None else {"old": old[key]}) for key in SAMPLES}
    keys, lengths = [key for key, _, _ in rows], [part.stop - part.start for _, _, part in rows]
    masks = {key: [token for row in SAMPLES[key][1] for token in row] for key in SAMPLES}
    segments = [segment for _, segment, _ in rows]
    columns: dict[str, list[list[object]]] = {
        "prompt_ids": [list(prompt_of(segment)) for segment in segments],
        "loss_mask": [list(masks[key][part]) for key, _, part in rows],
        "rollout_logprobs": [list(tokens_of(key)["rollout"][part]) for key, _, part in rows],
    }

    def score_table(column: str, name: str) -> pa.Table:
        table = scores(column, keys, [given[key][name][part] for key, _, part in rows])
        return table.set_column(3, table.schema.field("segment"), pa.array(segments, pa.int32()))

    def old_table() -> pa.Table:
        squares = pa.array([given[key]["squares"][part] for key, _, part in rows], SQUARE_SUMS.type)
        return score_table("old_logprobs", "old").append_column(SQUARE_SUMS, squares)

    rollouts = rollout_table(keys, lengths, 0, **columns)
    tables = [
        rollouts.set_column(3, rollouts.schema.field("segment"), pa.array(segments, pa.int32())),
        with_components(
            reward_table(list(SAMPLES), [reward for reward, _ in SAMPLES.values()]),
            [[("right", reward, 1.0), ("long", 1.0 - reward, 0.5)] for reward, _ in SAMPLES.values()],
        ),
        score_table("ref_logprobs", "ref"),
        *([old_table()] if moved else []),
    ]
    request = PrepareRequest(tuple(SAMPLES), prompt_rows={"p": 0, "q": 1}, compared={"p": 2, "q": 2})
    return prepare(advantage(config), request, tables)


def planned(summary: TrainSummary, chosen: Sequence[int], loss: PolicyLossConfig, layout: Layout) -> list[RankPlan]:
    return plan_update(
        summary.rows,
        chosen,
        layout.ranks,
        layout.budget,
        skip_zero_advantage=False,
        packed=layout.packed,
        share_prompts=layout.shared,
        whole_samples=loss.needs_whole_samples,
    )


def gradients(config: AlgorithmConfig, forked: bool, moved: bool, layout: Layout) -> list[dict[Key, list[float]]]:
    """The gradient by log-prob of every sample's tokens, for each mini-batch."""
    loss, (summary, table) = policy_loss(config), prepared(config, forked, moved)
    token_table, rows = TokenTable(table), rows_of(forked)
    leaves = {key: torch.tensor(tokens_of(key)["new"], requires_grad=True) for key in SAMPLES}
    samples = sample_rows(summary.rows, range(len(summary.rows)))
    found = []
    for part in minibatches(len(samples), layout.parts, (1, 2)):
        total = torch.zeros(())
        for plan in planned(summary, [row for sample in part for row in samples[sample]], loss, layout):
            for micro_batch in plan.micro_batches:
                batch = token_table.cut(micro_batch, plan)
                parts = [leaves[rows[row][0]][rows[row][2]] for row in batch.rows.tolist()]
                logprobs = torch.cat([*parts, torch.zeros(0)])
                numbers = (logprobs, torch.zeros(len(logprobs)))
                tokens = policy_tokens(token_table, batch, plan, loss, MAX_TOKENS, *numbers)
                total = total + losses.policy_loss(tokens, loss).loss
        slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found.append({key: [] if s is None else s.tolist() for key, s in zip(leaves, slopes, strict=True)})
    return found


def reads_old_logprobs(config: AdvantageConfig) -> bool:
    pairs = config.estimator in ("preference_pair", "reference_pair")
    return pairs or bool(config.kl_coef) or config.covariance != "keep" or config.reads_square_sums


LAYOUTS = [
    Layout(),
    Layout(budget=8),
    Layout(packed=True, budget=12),
    Layout(packed=True, shared=True, budget=30),
    Layout(ranks=2, budget=12),
    Layout(ranks=3, packed=True, shared=True),
    Layout(parts=2, ranks=2, packed=True, budget=20),
    Layout(parts=3),
]
CASES = [
    (row.name, moved)
    for row in ALGORITHMS.values()
    for moved in (False, True)
    if row.critic_loss is None
    # As one sequence, a sample has other turns; score_centering reads more than this batch has.
    and row.name not in ("remax", "gigpo", "score_centering")
    and (moved or not reads_old_logprobs(row.advantage))
]
"""Algorithms whose advantages need no more than this batch has, in the first update on it and in a later one."""
AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum", "constant", "only_token_mean"]


@cache
def whole_gradients(config: str, moved: bool, parts: int) -> list[dict[Key, list[float]]]:
    """Those of samples of one row each, by the configuration as JSON."""
    algorithm = AlgorithmConfig.model_validate_json(config)
    return gradients(algorithm, forked=False, moved=moved, layout=Layout(parts=parts))


def compare(config: AlgorithmConfig, moved: bool, layout: Layout) -> None:
    whole = whole_gradients(config.model_dump_json(exclude_unset=True), moved, layout.parts)
    forked = gradients(config, forked=True, moved=moved, layout=layout)
    assert len(forked) == len(whole) == layout.parts
    for one, other in zip(forked, whole, strict=True):
        for key, slopes in other.items():
            assert any(slopes) == any(one[key])
            if any(slopes):
                assert one[key] == pytest.approx(slopes, rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("name", "moved"), CASES)
def test_the_rows_of_a_sample_have_the_gradient_of_one_sequence(name: str, moved: bool, layout: Layout) -> None:
    compare(AlgorithmConfig(name=name), moved, layout)


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[6]], ids=str)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_weight_for_a_sample_is_the_product_over_its_rows(aggregation: str, mode: str, layout: Layout) -> None:
    importance = {"mode": mode, "level": "sequence", "cap": 1.3}
    config = {"name": "grpo", "aggregation": aggregation, "importance": importance}
    for moved in (False, True):
        compare(AlgorithmConfig.model_validate(config), moved, layout)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3], LAYOUTS[6]], ids=str)
def test_a_sample_is_left_out_by_the_mean_over_all_of_its_rows(layout: Layout) -> None:
    """Of ("p", 1) one row alone is beyond this bound, of ("p", 2) one alone is within."""
    config = {"name": "flash_reinforce", "importance": {"max_divergence": 0.062}}
    compare(AlgorithmConfig.model_validate(config), True, layout)
    (found,) = whole_gradients(AlgorithmConfig.model_validate(config).model_dump_json(exclude_unset=True), True, 1)
    assert any(found["p", 1]) and not any(found["p", 2])


@pytest.mark.parametrize(
    "layout",
    [Layout(budget=8), Layout(ranks=2, packed=True, budget=20), Layout(packed=True, shared=True)],
    ids=str,
)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_models_gradient_is_that_of_samples(name: str, layout: Layout) -> None:
    """A small transformer against the formulas, over the tokens of all rows of a sample; padded, packed and shared."""
    settings = {"name": name, "clip_range": 0.2, "importance": {"mode": "none"}}
    config = AlgorithmConfig.model_validate(settings)
    model = small_model()
    exact = copy.deepcopy(model).double()
    parts: dict[Key, list[torch.Tensor]] = {key: [] for key in SAMPLES}
    for key, segment, part in rows_of(forked=True):
        row = Sample(key, prompt_of(segment), list(range(part.stop - part.start)), 0.0, False)
        parts[key].append(exact_logprobs(exact, row))
    new = {key: torch.cat(rows) for key, rows in parts.items()}
    generator = torch.Generator().manual_seed(6)
    noise = {key: 0.15 * torch.randn(len(values), generator=generator) for key, values in new.items()}
    old = {key: (values.detach() + noise[key]).float().tolist() for key, values in new.items()}
    expected = torch.zeros((), dtype=torch.double)
    for key, (reward, masks) in SAMPLES.items():
        rewards = [other for (uid, _), (other, _) in SAMPLES.items() if uid == key[0]]
        above = (reward - fmean(rewards)) / (stdev(rewards) + 1e-4)
        own = torch.tensor([token for row in masks for token in row])
        change = (new[key] - torch.tensor(old[key], dtype=torch.double))[own]
        ratio = change.exp() if name == "grpo" else change.mean().exp()
        expected = expected - torch.minimum(ratio * above, ratio.clamp(0.8, 1.2) * above).mean() / len(SAMPLES)
    summary, table = prepared(config, forked=True, moved=True, old=old)
    plans = planned(summary, range(len(summary.rows)), policy_loss(config), layout)
    assert plans[0].shared == (layout.shared and name == "grpo")
    loss = loss_of(model, table, plans, policy_loss(config))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)


def test_six_turns_of_a_failure_weigh_as_much_as_a_solution_in_one() -> None:
    """Eight samples, 20 tokens a turn: four solve it in one turn, four fail after six turns of one row each."""
    mask = torch.ones(20, dtype=torch.bool)
    keys: list[Key] = [("g", index) for index in range(8)]
    turns = [1, 1, 1, 1, 6, 6, 6, 6]
    rows = [(key, segment) for key, count in zip(keys, turns, strict=True) for segment in range(count)]
    table = rollout_table([key for key, _ in rows], [20] * len(rows))
    segments = pa.array([segment for _, segment in rows], pa.int32())
    table = table.set_column(3, table.schema.field("segment"), segments)
    rewards = reward_table(keys, [*[1.0] * 4, *[0.0] * 4])
    config = AlgorithmConfig(name="grpo")
    summary, train = prepare(advantage(config), PrepareRequest(tuple(keys)), [table, rewards])
    (plan,) = planned(summary, range(len(rows)), policy_loss(config), Layout(budget=64))
    assert plan.total_sequences == 8
    token_table = TokenTable(train)
    weight = dict.fromkeys(keys, 0.0)
    for micro_batch in plan.micro_batches:
        batch = token_table.cut(micro_batch, plan)
        zeros = torch.zeros(len(batch.targets))
        tokens = policy_tokens(token_table, batch, plan, policy_loss(config), 20, zeros, zeros)
        for row, share in zip(micro_batch, tokens.weights.split([len(mask)] * len(micro_batch)), strict=True):
            weight[rows[row][0]] += float(share.sum())
    assert list(weight.values()) == pytest.approx([1 / 8] * 8)


def test_rows_of_a_sample_stay_together_where_the_loss_compares_them() -> None:
    config = AlgorithmConfig(name="gspo")
    summary, _ = prepared(config, forked=True, moved=True)
    assert [row.sample for row in summary.rows] == [0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5]
    for layout in LAYOUTS:
        plans = planned(summary, range(11), policy_loss(config), layout)
        cuts = [set(cut) for plan in plans for cut in plan.micro_batches if cut]
        assert len({len(plan.micro_batches) for plan in plans}) == 1
        # Row 5 has no token with loss.
        for sample in ({0}, {1, 2, 3}, {4, 6}, {7}, {8, 9}, {10}):
            assert sum(sample <= cut for cut in cuts) == 1, (sample, cuts)
        assert {plan.total_sequences for plan in plans} == {6}


def test_a_row_without_signal_stays_with_its_sample_where_the_loss_compares_them() -> None:
    """The other row's ratio depends on its tokens."""
    config = AlgorithmConfig(name="gspo")
    summary, _ = prepared(config, forked=True, moved=True)
    quiet = tuple(replace(row, has_signal=number in (2, 8)) for number, row in enumerate(summary.rows))
    everything = {"skip_zero_advantage": True, "whole_samples": True}
    (plan,) = plan_update(quiet, range(11), 1, 4096, **everything)
    assert sorted(row for cut in plan.micro_batches for row in cut) == [1, 2, 3, 8, 9]


def test_repetition_is_a_mean_over_samples() -> None:
    """One row without repetition, and a sample of two rows with 1/2 and 0."""
    keys: list[Key] = [("p", 0), ("p", 1), ("p", 1)]
    ids: list[list[object]] = [[1, 2, 3, 4], [7, 7, 7, 7, 7], [1, 2, 3, 4]]
    table = rollout_table(keys, [4, 5, 4], response_ids=ids)
    table = table.set_column(3, table.schema.field("segment"), pa.array([0, 0, 1], pa.int32()))
    tables = [table, reward_table(keys[:2], [1.0, 0.0])]
    summary, _ = prepare(advantage(AlgorithmConfig(name="grpo")), PrepareRequest((("p", 0), ("p", 1))), tables)
    assert summary.metrics["repetition"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masking_a_truncated_sample_leaves_out_all_of_its_rows(aggregation: str) -> None:
    """And none of the others: the totals are those of the samples that are left."""
    config = AlgorithmConfig.model_validate({"name": "grpo", "aggregation": aggregation})
    rows = rows_of(True)
    keys = [key for key, _, _ in rows]
    table = rollout_table(keys, [part.stop - part.start for _, _, part in rows])
    segments = pa.array([segment for _, segment, _ in rows], pa.int32())
    table = table.set_column(3, table.schema.field("segment"), segments)
    rewards = reward_table(list(SAMPLES), [reward for reward, _ in SAMPLES.values()])
    request = PrepareRequest(tuple(SAMPLES), masked=(("p", 1), ("q", 1)))
    summary, train = prepare(advantage(config), request, [table, rewards])
    kept = list(zip(train["prompt_uid"].to_pylist(), train["sample_index"].to_pylist(), strict=True))
    assert kept == [key for key in keys if key not in request.masked]
    (plan,) = planned(summary, range(len(kept)), policy_loss(config), Layout())
    assert plan.total_sequences == 4

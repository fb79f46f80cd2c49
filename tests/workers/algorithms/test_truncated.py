"""Overlong filtering: truncated samples count in their group's statistics and carry no loss.

The reference is a loop in float64 written from DAPO (arXiv 2503.14476, eq. 8 and sec. 3.4) and GRPO (arXiv 2402.03300,
eq. 3): advantages over the whole group, then the loss of the other samples alone, one sequence at a time.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.workers.algorithms.test_train_batch import Key, reward_table, rollout_table, scores
from tests.workers.models.test_modeling import SIZES
from troupe.orchestrator.training.micro_batches import minibatches, plan_update
from troupe.workers.algorithms.advantages import STD_EPS
from troupe.workers.algorithms.policy_loss import policy_loss, policy_tokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import AdvantageConfig, ImportanceConfig, PolicyLossConfig
from troupe.workers.contract.messages import TRAIN, PrepareRequest, RankPlan, TrainSummary
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.token_batch import TokenTable

GROUP = AdvantageConfig(estimator="group")
OLD_GAP = 0.15
"""Spread of old minus new log-prob: some tokens are beyond a clip bound."""


@dataclass(frozen=True)
class Sample:
    """One response to the prompt of its group."""

    key: Key
    prompt: list[int]
    response: list[int]
    reward: float
    truncated: bool


def samples() -> list[Sample]:
    """Three groups of four; one has no truncated sample, one two, and one only truncated ones."""
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=generator).tolist()

    prompts = {uid: ids(size) for uid, size in (("a", 9), ("b", 12), ("c", 8))}
    truncated = {("b", 0), ("b", 2), *(("c", index) for index in range(4))}
    made = []
    for uid, index in itertools.product("abc", range(4)):
        reward = float(torch.rand((), generator=generator))
        size = 6 if (uid, index) in truncated else 1 + index
        made.append(Sample((uid, index), prompts[uid], ids(size), reward, (uid, index) in truncated))
    return made


def small_model() -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def exact_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """float64 [response tokens], with gradient; the sample alone in the model."""
    logits = model(torch.tensor([sample.prompt + sample.response])).logits[0, len(sample.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(sample.response)[:, None])[:, 0]


def old_logprobs(exact: PreTrainedModel, given: list[Sample]) -> dict[Key, list[float]]:
    """Numbers near the model's own, rounded to float32 as the tables hold them."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        values = {sample.key: exact_logprobs(exact, sample) for sample in given}
    noise = {key: torch.randn(len(value), generator=generator) for key, value in values.items()}
    return {key: (value + OLD_GAP * noise[key]).float().tolist() for key, value in values.items()}


def reference(
    exact: PreTrainedModel, given: list[Sample], old: dict[Key, list[float]], config: PolicyLossConfig
) -> torch.Tensor:
    """The loss with truncated samples removed, over advantages that they are part of."""
    terms: list[list[torch.Tensor]] = []
    for sample in given:
        if sample.truncated:
            continue
        rewards = [other.reward for other in given if other.key[0] == sample.key[0]]
        advantage = (sample.reward - fmean(rewards)) / (stdev(rewards) + STD_EPS)
        ratios = (exact_logprobs(exact, sample) - torch.tensor(old[sample.key], dtype=torch.double)).exp()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        terms.append([-torch.minimum(r * advantage, r.clamp(low, high) * advantage) for r in ratios])
    if config.aggregation == "token_mean":
        return sum(itertools.chain.from_iterable(terms), torch.zeros(())) / sum(map(len, terms))
    means = [sum(term, torch.zeros(())) / len(term) for term in terms]
    return sum(means, torch.zeros(())) / len(means)


def prepared(
    given: list[Sample], old: dict[Key, list[float]], config: AdvantageConfig = GROUP
) -> tuple[TrainSummary, pa.Table]:
    keys = [sample.key for sample in given]
    columns: dict[str, Any] = {
        "prompt_ids": [list(sample.prompt) for sample in given],
        "response_ids": [list(sample.response) for sample in given],
    }
    tables = [
        rollout_table(keys, [len(sample.response) for sample in given], **columns),
        reward_table(keys, [sample.reward for sample in given]),
        scores("old_logprobs", keys, [old[key] for key in keys]),
    ]
    masked = tuple(sample.key for sample in given if sample.truncated)
    return prepare(config, PrepareRequest(tuple(keys), masked=masked), tables)


def loss_of(model: PreTrainedModel, table: pa.Table, plans: list[RankPlan], config: PolicyLossConfig) -> torch.Tensor:
    """Sum over ranks and micro-batches, as the trainers add it up."""
    tokens, module = TokenTable(table), CausalLogprobs(model, temperature=1.0, chunks=2)
    assert adapt(module, model, "cpu", plans[0].packed) == plans[0].packed
    total = torch.zeros(())
    for plan in plans:
        for rows in plan.micro_batches:
            batch = tokens.cut(rows, plan)
            logprobs, entropy = module(batch=batch)
            flat = policy_tokens(tokens, batch, plan, config, 6, logprobs, entropy)
            total = total + policy_loss(flat, config).loss
    return total


@pytest.mark.parametrize("budget", [24, 60, 4096])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_loss_and_its_gradient_are_those_without_the_truncated_samples(
    aggregation: str, layout: str, ranks: int, budget: int
) -> None:
    config = PolicyLossConfig.model_validate(
        {"clip_high": 0.28, "aggregation": aggregation, "importance": ImportanceConfig(mode="none")}
    )
    model, given = small_model(), samples()
    exact = copy.deepcopy(model).double()
    old = old_logprobs(exact, given)
    summary, table = prepared(given, old)
    rows = range(len(summary.rows))
    packed, shared = layout != "padded", layout == "shared"
    plans = plan_update(
        summary.rows, rows, ranks, budget, skip_zero_advantage=True, packed=packed, share_prompts=shared
    )
    assert (plans[0].packed, plans[0].shared) == (packed, shared)
    loss, expected = loss_of(model, table, plans, config), reference(exact, given, old, config)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)


def test_masked_samples_have_no_row_and_move_the_others_advantages() -> None:
    """Rewards 1, 0, 5, of which the last is truncated: the mean of the group is 2, not 1/2."""
    keys: list[Key] = [("a", 0), ("a", 1), ("a", 2)]
    tables = [rollout_table(keys, [2, 1, 4]), reward_table(keys, [1.0, 0.0, 5.0])]
    config = GROUP.model_copy(update={"normalize_by_std": False})
    summary, table = prepare(config, PrepareRequest(tuple(keys), masked=(("a", 2),)), tables)
    assert table.schema.equals(TRAIN, check_metadata=True)
    assert table["sample_index"].to_pylist() == [0, 1]
    assert table["advantages"].to_pylist() == [[-1.0, -1.0], [-2.0]]
    assert [(row.tokens, row.loss_tokens) for row in summary.rows] == [(4, 2), (3, 1)]


def test_whitening_leaves_the_tokens_of_masked_samples_out() -> None:
    """Mean 0 and variance 1 over the tokens that are trained on, whatever the others hold."""
    keys: list[Key] = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    config = AdvantageConfig(estimator="returns", whiten=True)
    tables = [rollout_table(keys, [2, 3, 1, 50]), reward_table(keys, [1.0, 4.0, -2.0, 100.0])]
    _, table = prepare(config, PrepareRequest(tuple(keys), masked=(("b", 1),)), tables)
    own = torch.tensor([1.0] * 2 + [4.0] * 3 + [-2.0], dtype=torch.double)
    expected = ((own - own.mean()) / (own.var() + 1e-8).sqrt()).tolist()
    assert list(itertools.chain(*table["advantages"].to_pylist())) == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_truncated_samples_is_an_empty_update() -> None:
    given = [sample for sample in samples() if sample.truncated]
    summary, table = prepared(given, {sample.key: [-1.0] * len(sample.response) for sample in given})
    assert summary.rows == () and table.num_rows == 0
    for ranks, share in itertools.product((1, 2), (False, True)):
        for part in minibatches(0, 3, (1, 2)):
            plans = plan_update((), part, ranks, 64, skip_zero_advantage=False, share_prompts=share)
            assert plans == [RankPlan((), 0, 0)] * ranks


def test_a_masked_sample_must_be_kept() -> None:
    keys: list[Key] = [("a", 0), ("a", 1)]
    tables = [rollout_table(keys, [2, 1]), reward_table(keys, [1.0, 0.0])]
    with pytest.raises(ValueError, match=r"sample a\[7\] is masked, but it is not kept"):
        prepare(GROUP, PrepareRequest(tuple(keys), masked=(("a", 7),)), tables)

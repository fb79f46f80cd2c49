"""Score centering: the mean that is left of a score under the sampler, and the gradient of a batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.algorithms.test_train_batch import reward_table, rollout_table
from tests.workers.algorithms.test_truncated import Sample, samples, small_model
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.policy_loss import PolicyTokens, policy_loss, policy_tokens
from troupe.workers.algorithms.score_centering import SamplerTokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import ImportanceConfig, PolicyLossConfig
from troupe.workers.contract.messages import ROLLOUTS, SAMPLER_TOKENS, PrepareRequest, RankPlan, TrainSummary
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.token_batch import TokenTable

ROW = ALGORITHMS["score_centering"]
VOCABULARY, TOP_K, TEMPERATURE = 7, 5, 0.8
WEIGHTS = [
    ImportanceConfig(mode="none"),
    ImportanceConfig(cap=1.2),
    ImportanceConfig(mode="mask", cap=1.5),
    ImportanceConfig(cap=None),
]


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, and log-probs of a sampler that is far from it."""
    generator = torch.Generator().manual_seed(seed)
    logits, sampler = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.double)
    return logits.requires_grad_(), sampler.log_softmax(-1)


def expected_gradient(logits: torch.Tensor, sampler: torch.Tensor, top_k: int, how: ImportanceConfig) -> torch.Tensor:
    """The gradient of the loss with advantage 1, averaged over every token that the sampler could have sampled, with
    the first `top_k` tokens known."""
    ids = torch.arange(top_k).expand(VOCABULARY, -1)
    mean, mass = SamplerTokens(ids, sampler[ids], how).read(logits.expand(VOCABULARY, -1))
    tokens = PolicyTokens(
        logprobs=logits.log_softmax(-1),
        entropy=torch.zeros(VOCABULARY),
        rollout_logprobs=sampler,
        advantages=torch.ones(VOCABULARY, dtype=torch.double),
        weights=sampler.exp(),
        loss_mask=torch.ones(VOCABULARY, dtype=torch.bool),
        sequence=torch.arange(VOCABULARY),
        centering=mean,
        sampler_mass=mass,
    )
    loss = policy_loss(tokens, ROW.loss.model_copy(update={"importance": how})).loss
    return torch.autograd.grad(loss, logits)[0]


def drift(logits: torch.Tensor, sampler: torch.Tensor, how: ImportanceConfig) -> torch.Tensor:
    """The gradient of the same average without centering: sum_a q_a w_a (onehot(a) - p), one token at a time."""
    p, q, total = logits.detach().softmax(-1), sampler.exp(), torch.zeros(VOCABULARY, dtype=torch.double)
    for token in range(VOCABULARY):
        weight, cap = float(p[token] / q[token]), how.cap or float("inf")
        inside = 1 / cap <= weight <= cap
        weight = 1.0 if how.mode == "none" else weight * inside if how.mode == "mask" else min(weight, cap)
        total += q[token] * weight * (torch.eye(VOCABULARY, dtype=torch.double)[token] - p)
    return -total


@pytest.mark.parametrize("how", WEIGHTS, ids=lambda how: f"{how.mode}-{how.cap}")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_over_the_whole_vocabulary_the_centered_score_has_mean_zero(seed: int, how: ImportanceConfig) -> None:
    """With any weights. Without centering the policy drifts, unless the weights are exact."""
    logits, sampler = distributions(seed)
    assert expected_gradient(logits, sampler, VOCABULARY, how).abs().max() < 1e-14
    exact = how.mode == "truncate" and how.cap is None
    assert (
        (drift(logits, sampler, how).abs().max() < 1e-14) if exact else (drift(logits, sampler, how).abs().max() > 0.01)
    )


@pytest.mark.parametrize("how", WEIGHTS, ids=lambda how: f"{how.mode}-{how.cap}")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_tail_in_the_policys_proportions_has_mean_zero_too(seed: int, how: ImportanceConfig) -> None:
    logits, sampler = distributions(seed)
    p, q = logits.detach().softmax(-1), sampler.exp()
    tail = p[TOP_K:] * (1 - q[:TOP_K].sum()) / p[TOP_K:].sum()
    assert expected_gradient(logits, torch.cat([q[:TOP_K], tail]).log(), TOP_K, how).abs().max() < 1e-14


def test_another_tail_leaves_a_mean_that_is_smaller_than_without_centering() -> None:
    """The documented approximation: the tail's own mean is not known."""
    logits, sampler = distributions(4)
    left, plain = expected_gradient(logits, sampler, TOP_K, WEIGHTS[0]), drift(logits, sampler, WEIGHTS[0])
    assert 1e-3 < left.abs().max() < 0.5 * plain.abs().max()


def test_equal_distributions_leave_reinforce() -> None:
    logits, _ = distributions(5)
    own = logits.detach().log_softmax(-1)
    ids = own.topk(TOP_K).indices[None]
    mean, mass = SamplerTokens(ids, own[ids], ROW.loss.importance).read(logits[None])
    assert torch.autograd.grad(mean.sum(), logits)[0].abs().max() < 1e-15
    assert float(mass) == pytest.approx(float(own.exp()[ids].sum()))


def test_a_sampler_that_leaves_nothing_outside_is_finite() -> None:
    """A form permits few tokens: the others have a log-prob of -inf."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(6)).requires_grad_()
    logprobs = torch.tensor([[-0.2, float(np.log1p(-np.exp(-0.2))), -torch.inf]])
    mean, mass = SamplerTokens(torch.tensor([[2, 5, 0]]), logprobs, ROW.loss.importance).read(logits)
    (slope,) = torch.autograd.grad(mean.sum(), logits)
    assert slope.isfinite().all() and float(mass) == pytest.approx(1.0)


# --- A batch through a model ---


def sampler_of(sample: Sample) -> torch.Tensor:
    """float64 [response tokens, vocabulary]: log-probs of a sampler, at random."""
    generator = torch.Generator().manual_seed(10 * "abc".index(sample.key[0]) + sample.key[1])
    return (2.0 * torch.randn(len(sample.response), 50, generator=generator)).double().log_softmax(-1)


def likeliest(sample: Sample, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = sampler_of(sample).topk(top_k)
    return ids, values.float()


def reference(exact: PreTrainedModel, given: list[Sample], top_k: int) -> torch.Tensor:
    """The loss of score centering with weights min(p / q, 2), token by token in float64."""
    losses = []
    for s in given:
        rewards = [other.reward for other in given if other.key[0] == s.key[0]]
        advantage = s.reward - sum(rewards) / len(rewards)
        logits = exact(torch.tensor([s.prompt + s.response])).logits[0, len(s.prompt) - 1 : -1]
        policy, sampler, (ids, heads) = (logits / TEMPERATURE).log_softmax(-1), sampler_of(s), likeliest(s, top_k)
        for t, token in enumerate(s.response):
            p, q = policy[t, ids[t]].detach().exp(), heads[t].double().exp()
            rho = (1 - q.sum()) / (1 - p.sum())
            coefs = torch.minimum(p, 2 * q) - torch.clamp(2 * rho, max=1.0) * p
            weight = torch.exp(policy[t, token].detach() - sampler[t, token].float().double()).clamp(max=2.0)
            losses.append(-advantage * (weight * policy[t, token] - (coefs * policy[t, ids[t]]).sum()))
    return torch.stack(losses).mean()


def prepared(given: list[Sample], top_k: int) -> tuple[TrainSummary, pa.Table]:
    keys = [sample.key for sample in given]
    tops = [
        [i.int().numpy().tobytes() + x.numpy().tobytes() for i, x in zip(*likeliest(s, top_k), strict=True)]
        for s in given
    ]
    columns: dict[str, Any] = {
        "prompt_ids": [list(sample.prompt) for sample in given],
        "response_ids": [list(sample.response) for sample in given],
        "rollout_logprobs": [sampler_of(s)[range(len(s.response)), s.response].float().tolist() for s in given],
    }
    rollouts = rollout_table(keys, [len(sample.response) for sample in given], 0, **columns)
    place = ROLLOUTS.get_field_index(SAMPLER_TOKENS.name)
    rollouts = rollouts.set_column(place, SAMPLER_TOKENS, pa.array(tops, SAMPLER_TOKENS.type))
    return prepare(
        ROW.advantage, PrepareRequest(tuple(keys)), [rollouts, reward_table(keys, [s.reward for s in given])]
    )


def loss_of(model: PreTrainedModel, table: pa.Table, plans: list[RankPlan], config: PolicyLossConfig) -> torch.Tensor:
    """Sum over ranks and micro-batches, as the trainers add it up."""
    tokens, module = TokenTable(table), CausalLogprobs(model, TEMPERATURE, chunks=2)
    assert adapt(module, model, "cpu", plans[0].packed) == plans[0].packed
    total = torch.zeros(())
    for plan in plans:
        for rows in (*plan.micro_batches, ()):
            batch = tokens.cut(rows, plan)
            reader = SamplerTokens(*tokens.likeliest(batch), config.importance)
            logprobs, entropy, mean, mass = module(batch=batch, reader=reader)
            flat = policy_tokens(tokens, batch, plan, config, 6, logprobs, entropy)
            flat = replace(flat, centering=mean, sampler_mass=mass)
            total = total + policy_loss(flat, config).loss
    return total


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_a_batchs_gradient_is_that_of_a_loop_over_its_tokens(layout: str, ranks: int, budget: int) -> None:
    given, top_k = samples(), 9
    model = small_model()
    exact = copy.deepcopy(model).double()
    summary, table = prepared(given, top_k)
    packed, shared = layout != "padded", layout == "shared"
    how: dict[str, Any] = {"skip_zero_advantage": True, "packed": packed, "share_prompts": shared}
    plans = plan_update(summary.rows, range(len(summary.rows)), ranks, budget, **how)
    assert (plans[0].packed, plans[0].shared) == (packed, shared)
    loss, expected = loss_of(model, table, plans, ROW.loss), reference(exact, given, top_k)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=2e-6)


def test_tokens_without_loss_need_no_likeliest_ones_and_tokens_with_loss_do() -> None:
    _, table = prepared(samples(), 3)
    rows = table.slice(0, 2)
    first = rows.column("loss_mask").to_pylist()
    masked = rows.set_column(
        rows.schema.get_field_index("loss_mask"), rows.schema.field("loss_mask"), pa.array([[False], first[1]])
    )
    column = [[b""], rows.column("sampler_tokens").to_pylist()[1]]
    place = rows.schema.get_field_index("sampler_tokens")
    for one, problem in ((masked, False), (rows, True)):
        tokens = TokenTable(one.set_column(place, SAMPLER_TOKENS, pa.array(column, SAMPLER_TOKENS.type)))
        batch = tokens.batch([0, 1])
        if problem:
            with pytest.raises(ValueError, match="no likeliest tokens of the sampler"):
                tokens.likeliest(batch)
        else:
            ids, logprobs = tokens.likeliest(batch)
            assert ids.shape == logprobs.shape == (3, 3) and not ids[0].any()
            assert ids[1:].tolist() == likeliest(samples()[1], 3)[0].tolist()


def test_a_loss_without_the_samplers_tokens_is_refused() -> None:
    none = torch.zeros(1)
    tokens = PolicyTokens(none, none, none, none, none, none.bool(), none.long())
    with pytest.raises(ValueError, match="needs the sampler's likeliest tokens"):
        policy_loss(tokens, ROW.loss)

"""The bare loop trains with the product's gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from benchmarks.support.bare_loop import BareTrainer, KernelTrainer, SampledSequence, group_advantages
from benchmarks.support.workload import grpo_spec
from tests.benchmarks.settings import SETTINGS
from troupe.orchestrator.roles.settings import policy_config
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.advantages import group_advantages as product_advantages
from troupe.workers.algorithms.policy_loss import PolicyTokens, policy_loss, token_weights
from troupe.workers.contract.messages import ROLLOUTS, TrainRow
from troupe.workers.models.modeling import CausalLogprobs, load_causal
from troupe.workers.models.token_batch import TokenTable

ROLLOUT_TOKENS = pa.schema(
    [ROLLOUTS.field(name) for name in ("prompt_ids", "response_ids", "rollout_logprobs", "loss_mask")]
)


def batch() -> tuple[list[SampledSequence], torch.Tensor]:
    """Two groups of two, of uneven lengths, and their rewards."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(20, 4096, (count,), generator=generator).tolist()

    sampled = [
        SampledSequence(ids(prompt), ids(response), torch.randn(response, generator=generator).sub(8.3).tolist())
        for prompt, response in ((3, 5), (3, 2), (6, 1), (6, 4))
    ]
    return sampled, torch.tensor([[0.1, 0.5], [0.9, 0.3]]).double()


def test_bare_loop_has_the_products_gradient(tiny_model: Path) -> None:
    plan = policy_config(grpo_spec(replace(SETTINGS, model=tiny_model), tiny_model, 1, 4))
    plan = plan.model_copy(update={"trainer": plan.trainer.model_copy(update={"micro_batch_tokens": 16})})
    sampled, rewards = batch()
    advantages = group_advantages(rewards)
    groups = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(advantages, product_advantages(rewards.flatten(), groups, True))
    bare = BareTrainer(plan)
    figures = bare.add_gradients(sampled, advantages)

    model = load_causal(plan.model)
    module = CausalLogprobs(model, plan.sampling.temperature)
    rows = [
        {
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response_ids,
            "rollout_logprobs": one.rollout_logprobs,
            "loss_mask": [True] * len(one.response_ids),
        }
        for one in sampled
    ]
    table = TokenTable(pa.Table.from_pylist(rows, schema=ROLLOUT_TOKENS))
    lengths = [TrainRow(len(one.prompt_ids) + len(one.response_ids), len(one.response_ids), True) for one in sampled]
    (ranks,) = plan_update(lengths, range(4), 1, 16, skip_zero_advantage=True)
    assert len(ranks.micro_batches) > 1
    loss = 0.0
    for micro_batch in table.batches(ranks):
        logprobs, entropy = module(batch=micro_batch)
        rollout_logprobs = table.floats("rollout_logprobs", micro_batch)
        assert rollout_logprobs is not None
        weights = token_weights(
            micro_batch.loss_mask, micro_batch.lengths[micro_batch.sequence], "token_mean", 12, 4, 3
        )
        tokens = PolicyTokens(
            logprobs=logprobs,
            entropy=entropy,
            rollout_logprobs=rollout_logprobs,
            advantages=advantages.float()[micro_batch.rows][micro_batch.sequence],
            weights=weights,
            loss_mask=micro_batch.loss_mask,
            sequence=micro_batch.sequence,
        )
        output = policy_loss(tokens, plan.loss)
        output.loss.backward()
        loss += float(output.loss.detach())
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    for own, parameter in zip(bare.gradients(), model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-7)


def test_the_kernels_compute_the_bare_loops_gradient(tiny_model: Path) -> None:
    """Packed, behind one copy of each prompt, and without the row that has no advantage."""
    plan = policy_config(grpo_spec(replace(SETTINGS, model=tiny_model), tiny_model, 1, 4))
    sampled, rewards = batch()
    sampled[1] = replace(sampled[1], prompt_ids=sampled[0].prompt_ids)
    sampled[3] = replace(sampled[3], prompt_ids=sampled[2].prompt_ids)
    advantages = group_advantages(rewards)
    advantages[2] = 0.0
    bare, kernels = BareTrainer(plan), KernelTrainer(plan)
    expected, found = (trainer.add_gradients(sampled, advantages) for trainer in (bare, kernels))
    assert found == pytest.approx(expected, rel=1e-4)
    for own, reference in zip(kernels.gradients(), bare.gradients(), strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-3, atol=1e-6)


def test_bare_loop_trains_and_starts_the_next_step_clean(tiny_model: Path) -> None:
    bare = BareTrainer(
        policy_config(grpo_spec(replace(SETTINGS, model=tiny_model), tiny_model, 1, 4, learning_rate=1e-3))
    )
    sampled, rewards = batch()
    before = {name: weight.clone() for name, weight in bare.named_weights()}
    first = bare.update(sampled, group_advantages(rewards))
    assert first["grad_norm"] > 0
    assert all(not torch.equal(weight, before[name]) for name, weight in bare.named_weights() if weight.ndim > 1)
    assert all(not gradient.any() for gradient in bare.gradients())

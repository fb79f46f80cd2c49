"""Losses by source: the gradient of a mixed batch is the sum of the gradients of the sources, each by its own loss.

The reference is a loop in float64 over the samples, with PPO's clip (arXiv 1707.06347, eq. 7) and the k3 estimate of
the KL divergence in the settings of the sample's source, divided by the tokens or samples of the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.algorithms.test_train_batch import Key, reward_table, rollout_table, scores
from tests.workers.algorithms.test_truncated import Sample, exact_logprobs, old_logprobs, samples, small_model
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.advantages import STD_EPS
from troupe.workers.algorithms.policy_loss import LossOutput, loss_by_source, policy_tokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.advantage_state import AdvantageState, Moments, PromptHistory
from troupe.workers.contract.algorithm_config import AdvantageConfig, ImportanceConfig, PolicyLossConfig
from troupe.workers.contract.messages import PrepareRequest, RankPlan, TrainSummary
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.token_batch import TokenTable

RUN = PolicyLossConfig(clip_low=0.1, clip_high=0.1, importance=ImportanceConfig(mode="none"))
LOSSES: Mapping[str, PolicyLossConfig] = {
    "": RUN,
    "wide": RUN.model_copy(update={"clip_low": 0.3, "clip_high": 0.5, "kl_coef": 0.2}),
    "whole": RUN.model_copy(update={"aggregation": "sequence_mean", "kl_coef": 0.05}),
}
SOURCES = {"a": "", "b": "wide", "c": "whole"}
"""The loss of each group."""


def prepared(
    given: list[Sample], old: dict[Key, list[float]], reference: dict[Key, list[float]]
) -> tuple[TrainSummary, pa.Table]:
    keys = [sample.key for sample in given]
    columns: dict[str, Any] = {
        "prompt_ids": [one.prompt for one in given],
        "response_ids": [one.response for one in given],
    }
    tables = [
        rollout_table(keys, [len(sample.response) for sample in given], **columns),
        reward_table(keys, [sample.reward for sample in given]),
        scores("old_logprobs", keys, [old[key] for key in keys]),
        scores("ref_logprobs", keys, [reference[key] for key in keys]),
    ]
    losses = {uid: source for uid, source in SOURCES.items() if source}
    return prepare(AdvantageConfig(estimator="group"), PrepareRequest(tuple(keys), algorithms=losses), tables)


def loop(
    exact: PreTrainedModel, given: list[Sample], old: dict[Key, list[float]], reference: dict[Key, list[float]]
) -> torch.Tensor:
    tokens, loss = sum(len(sample.response) for sample in given), torch.zeros((), dtype=torch.double)
    for sample in given:
        config = LOSSES[SOURCES[sample.key[0]]]
        rewards = [other.reward for other in given if other.key[0] == sample.key[0]]
        advantage = (sample.reward - fmean(rewards)) / (stdev(rewards) + STD_EPS)
        logprobs = exact_logprobs(exact, sample)
        ratio = (logprobs - torch.tensor(old[sample.key], dtype=torch.double)).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        gap = torch.tensor(reference[sample.key], dtype=torch.double) - logprobs
        terms = config.kl_coef * (gap.exp() - 1 - gap) - torch.minimum(ratio * advantage, clipped * advantage)
        by_tokens = config.aggregation == "token_mean"
        loss = loss + (terms.sum() / tokens if by_tokens else terms.mean() / len(given))
    return loss


def found(model: PreTrainedModel, table: pa.Table, plans: list[RankPlan]) -> list[LossOutput]:
    """The losses of the micro-batches of all ranks."""
    tokens, module, outputs = TokenTable(table), CausalLogprobs(model, temperature=1.0, chunks=2), list[LossOutput]()
    assert adapt(module, model, "cpu", plans[0].packed) == plans[0].packed
    for plan in plans:
        for rows in plan.micro_batches:
            batch = tokens.cut(rows, plan)
            logprobs, entropy = module(batch=batch)
            inputs = partial(policy_tokens, tokens, batch, plan, max_tokens=6, logprobs=logprobs, entropy=entropy)
            outputs.append(loss_by_source(LOSSES, tokens, batch, lambda own, made=inputs: made(config=own)))
    return outputs


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize(("ranks", "layout"), [(1, "padded"), (2, "packed"), (2, "shared")])
def test_a_mixed_batch_has_the_gradients_of_its_sources(ranks: int, layout: str, budget: int) -> None:
    model, given = small_model(), [replace(sample, truncated=False) for sample in samples()]
    exact = copy.deepcopy(model).double()
    old, reference = old_logprobs(exact, given), old_logprobs(exact, given[::-1])
    summary, table = prepared(given, old, reference)
    packed, shared = layout != "padded", layout == "shared"
    how = {"skip_zero_advantage": False, "packed": packed, "share_prompts": shared}
    outputs = found(model, table, plan_update(summary.rows, range(len(summary.rows)), ranks, budget, **how))
    loss, expected = torch.stack([one.loss for one in outputs]).sum(), loop(exact, given, old, reference)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)
    names = {(*one.terms, *one.sums, *one.maxima) for one in outputs}
    assert len(names) == 1 and "kl_loss" in names.pop(), "ranks add up the same metrics"
    assert sum(float(one.sums["tokens"]) for one in outputs) == sum(len(sample.response) for sample in given)


def test_sources_have_the_advantages_of_their_estimators() -> None:
    """As if each source were a batch. Groups lie between each other, and two of three keep something of the batch."""
    keys: list[Key] = [(uid, index) for index in range(3) for uid in "cab"]
    lengths = [1 + (7 * place) % 4 for place in range(9)]
    rewards = [1.0, 0.0, 2.0, 4.0, 1.0, 7.0, 3.0, 0.0, 5.0]
    run, names = AdvantageConfig(estimator="smooth_group"), {"b": "looped", "c": "smooth"}
    own = {
        "looped": AdvantageConfig(
            estimator="returns", baseline="running_mean", reward_scale="running", reward_clip=0.5
        ),
        "smooth": AdvantageConfig(estimator="smooth_group"),
    }
    state = AdvantageState(prompts={3: PromptHistory(visits=1, rewards=Moments().seen([9.0, 2.0]))})

    def advantages(uids: str, config: AdvantageConfig, **sources: Any) -> tuple[TrainSummary, dict[Key, list[float]]]:
        chosen = [place for place, (uid, _) in enumerate(keys) if uid in uids]
        held, rows = [keys[place] for place in chosen], {"a": 1, "b": 2, "c": 3}
        tables = [
            rollout_table(held, [lengths[place] for place in chosen]),
            reward_table(held, [rewards[place] for place in chosen]),
        ]
        request = PrepareRequest(tuple(held), state, {uid: rows[uid] for uid in uids}, algorithms=names)
        summary, table = prepare(config, request, tables, **sources)
        return summary, dict(zip(held, table["advantages"].to_pylist(), strict=True))

    summary, found = advantages("cab", run, sources=own)
    alone = {uid: advantages(uid, own[names[uid]] if uid in names else run) for uid in "abc"}
    assert found == {key: alone[key[0]][1][key] for key in keys}
    assert summary.state.rewards == alone["b"][0].state.rewards and summary.state.rewards.count == 3
    assert summary.state.prompts == {**alone["a"][0].state.prompts, **alone["c"][0].state.prompts}
    assert {row: one.visits for row, one in summary.state.prompts.items()} == {1: 1, 3: 2}
    assert advantages("cab", run)[1] != found

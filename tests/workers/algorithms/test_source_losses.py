"""Losses by source: the gradient of a mixed batch is the sum of the gradients of the sources, each by its own loss.

The reference is a loop in float64 over sources, samples and tokens (`rollout_loops`): the loss of each source's samples
with its estimate of the KL divergence, divided by the tokens or samples of the whole batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.algorithms import rollout_loops as loops
from tests.workers.algorithms.rollout_loops import LOOPS
from tests.workers.algorithms.test_train_batch import Key, reward_table, rollout_table, scores
from tests.workers.algorithms.test_truncated import Sample, exact_logprobs, old_logprobs, samples, small_model
from troupe.orchestrator.algorithms.section import AlgorithmConfig, SourceAlgorithm, policy_loss, source_loss
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.policy_loss import LossOutput, loss_by_source, policy_tokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.advantage_state import AdvantageState, Moments, PromptHistory
from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.messages import PrepareRequest, RankPlan, TrainSummary
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.token_batch import TokenTable


@dataclass(frozen=True)
class Own:
    """The loss of a source, in the spec's words and as a loop."""

    given: dict[str, Any]
    """Fields of the run's algorithm, or what the source replaces."""
    token: Callable[[loops.Sample, int, float], torch.Tensor]
    reduce: Callable[[Sequence[Sequence[torch.Tensor]], loops.Batch], torch.Tensor]
    kl_coef: float = 0.0
    estimator: str = "k3"


def named(name: str, **own: Any) -> Own:
    """The loss of another algorithm; `own`: what the run or the source adds."""
    loop, kl = LOOPS[name], {"kl_coef": own.get("kl_coef", 0.0), "estimator": own.get("kl_estimator", "k3")}
    return Own({"loss": name, **own}, loop.token, loop.reduce, **kl)


def run(name: str, estimator: str = "k3") -> Own:
    return Own(
        {"name": name, "kl": {"coef": 0.1, "estimator": estimator}},
        LOOPS[name].token,
        LOOPS[name].reduce,
        0.1,
        estimator,
    )


def clipped(low: float, high: float, reduce: Any, **given: Any) -> Own:
    return Own(given, loops.clipped(low, high), reduce, given.get("kl_coef", 0.0))


MIXES: Mapping[str, dict[str, Own]] = {
    "clips": {
        "": clipped(0.1, 0.1, loops.token_mean, name="dapo", clip_range=0.1),
        "b": clipped(0.3, 0.5, loops.token_mean, clip_low=0.3, clip_high=0.5, kl_coef=0.2),
        "c": clipped(0.1, 0.1, loops.sequence_mean, aggregation="sequence_mean", kl_coef=0.05),
    },
    "sequence": {"": run("dapo"), "b": named("gspo", kl_coef=0.0), "c": named("cispo", kl_coef=0.3, kl_estimator="k2")},
    "soft": {
        "": run("gmpo", "k2"),
        "b": named("sapo", kl_coef=0.2, kl_estimator="k1"),
        "c": named("dppo_tv", kl_coef=0),
    },
    "bounds": {"": run("cispo"), "b": named("dcpo", kl_coef=0.0), "c": named("gmpo", kl_coef=0.4)},
    "plain": {
        "": run("gspo", "k1"),
        "b": named("reinforce", kl_coef=0.1, kl_estimator="k3"),
        "c": named("gspo_token", kl_coef=0),
    },
}
"""The losses of the groups a (the run's), b and c."""


def configured(mix: Mapping[str, Own]) -> dict[str, PolicyLossConfig]:
    """The losses as the policy gets them, by source."""
    of_run = AlgorithmConfig.model_validate(mix[""].given)
    sources = {name: SourceAlgorithm.model_validate(mix[name].given) for name in "bc"}
    return {"": policy_loss(of_run), **{name: source_loss(of_run, own) for name, own in sources.items()}}


def prepared(
    given: list[Sample], old: dict[Key, list[float]], reference: dict[Key, list[float]]
) -> tuple[TrainSummary, pa.Table]:
    keys = [sample.key for sample in given]
    columns: dict[str, Any] = {
        "prompt_ids": [one.prompt for one in given],
        "response_ids": [one.response for one in given],
        "rollout_logprobs": [rollout_logprobs(old[key]) for key in keys],
    }
    tables = [
        rollout_table(keys, [len(sample.response) for sample in given], **columns),
        reward_table(keys, [sample.reward for sample in given]),
        scores("old_logprobs", keys, [old[key] for key in keys]),
        scores("ref_logprobs", keys, [reference[key] for key in keys]),
    ]
    request = PrepareRequest(tuple(keys), algorithms={"b": "b", "c": "c"})
    return prepare(AdvantageConfig(estimator="group"), request, tables)


def rollout_logprobs(old: Sequence[float]) -> list[float]:
    """Log-probs that the engine sampled with; some importance weights are cut."""
    return [float(np.float32(value + 0.5 * math.sin(7 * place) - 0.4)) for place, value in enumerate(old)]


def kl(sample: loops.Sample, t: int, estimator: str) -> torch.Tensor:
    """Schulman, "Approximating KL divergence"; k1 with the gradient of k2."""
    gap = sample.new[t] - sample.ref[t]
    k2 = gap * gap / 2
    return {"k1": gap.detach() + k2 - k2.detach(), "k2": k2, "k3": torch.exp(-gap) - 1 + gap}[estimator]


def loop(
    mix: Mapping[str, Own],
    exact: PreTrainedModel,
    given: list[Sample],
    old: dict[Key, list[float]],
    reference: dict[Key, list[float]],
) -> torch.Tensor:
    made = [
        loops.Sample(
            prompt="abc".index(one.key[0]),
            reward=one.reward,
            greedy=0.0,
            new=exact_logprobs(exact, one).unbind(),
            old=old[one.key],
            ref=reference[one.key],
            rollout=rollout_logprobs(old[one.key]),
            values=(),
        )
        for one in given
    ]
    batch, zero, total = loops.Batch(made, max_tokens=6), torch.zeros((), dtype=torch.double), []
    for group, own in enumerate(mix.values()):
        rows = [
            [
                own.token(s, t, a[t]) + own.kl_coef * kl(s, t, own.estimator) if s.prompt == group else zero
                for t in range(len(s))
            ]
            for s, a in zip(made, loops.grpo(batch), strict=True)
        ]
        total.append(own.reduce(rows, batch))
    return torch.stack(total).sum()


def found(
    losses: Mapping[str, PolicyLossConfig], model: PreTrainedModel, table: pa.Table, plans: list[RankPlan]
) -> list[LossOutput]:
    """The losses of the micro-batches of all ranks."""
    tokens, module, outputs = TokenTable(table), CausalLogprobs(model, temperature=1.0, chunks=2), list[LossOutput]()
    assert adapt(module, model, "cpu", plans[0].packed) == plans[0].packed
    for plan in plans:
        for rows in plan.micro_batches:
            batch = tokens.cut(rows, plan)
            logprobs, entropy = module(batch=batch)
            inputs = partial(policy_tokens, tokens, batch, plan, max_tokens=6, logprobs=logprobs, entropy=entropy)
            outputs.append(loss_by_source(losses, tokens, batch, lambda own, made=inputs: made(config=own)))
    return outputs


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize(("ranks", "layout"), [(1, "padded"), (2, "packed"), (2, "shared")])
@pytest.mark.parametrize("name", MIXES)
def test_a_mixed_batch_has_the_gradients_of_its_sources(name: str, ranks: int, layout: str, budget: int) -> None:
    mix, losses = MIXES[name], configured(MIXES[name])
    model, given = small_model(), [replace(sample, truncated=False) for sample in samples()]
    exact = copy.deepcopy(model).double()
    old, reference = old_logprobs(exact, given), old_logprobs(exact, given[::-1])
    summary, table = prepared(given, old, reference)
    packed, shared = layout != "padded", layout == "shared"
    whole = any(loss.needs_whole_samples for loss in losses.values())
    how = {"skip_zero_advantage": False, "packed": packed, "share_prompts": shared, "whole_samples": whole}
    outputs = found(losses, model, table, plan_update(summary.rows, range(len(summary.rows)), ranks, budget, **how))
    loss, expected = torch.stack([one.loss for one in outputs]).sum(), loop(mix, exact, given, old, reference)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)
    names = {(*one.terms, *one.sums, *one.maxima) for one in outputs}
    assert len(names) == 1 and {"kl_loss", "clip_fraction"} < {*names.pop()}, "ranks add up the same metrics"
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

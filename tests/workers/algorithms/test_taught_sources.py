"""A mixture in which a teacher scores some sources: its divergence is a term of their samples' loss alone.

The reference is a loop in float64 over the samples: GRPO's loss (arXiv 2402.03300, eq. 3) of the rewarded sources, and
the divergence from the teacher by plain probabilities of the taught one, over the tokens of the whole batch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.algorithms.test_train_batch import Key, reward_table, rollout_table, scores
from tests.workers.algorithms.test_truncated import Sample, exact_logprobs, old_logprobs, samples, small_model
from tests.workers.models.test_distillation import plainly
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.advantages import STD_EPS
from troupe.workers.algorithms.policy_loss import LossOutput, policy_loss, policy_tokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import AdvantageConfig, DistillConfig, ImportanceConfig, PolicyLossConfig
from troupe.workers.contract.messages import TEACHER_WEIGHTS, PrepareRequest, RankPlan, TrainSummary
from troupe.workers.models.distillation import TopTeacher, TopTokens
from troupe.workers.models.modeling import CausalLogprobs, score_plan
from troupe.workers.models.token_batch import TokenTable

TEACHER, COEF, WEIGHT, K = "teacher.large", 0.7, 0.5, 4
SOURCES = {"a": "maths", "b": "chat", "c": "maths"}
"""Source of each prompt; the teacher teaches `chat`, whose samples have no advantages."""
GROUP, NONE = AdvantageConfig(estimator="group"), AdvantageConfig(estimator="none")


def config_of(divergence: str) -> PolicyLossConfig:
    distill = DistillConfig.model_validate({"coef": COEF, "k": K, "divergence": divergence})
    return PolicyLossConfig(distill=distill, importance=ImportanceConfig(mode="none"))


def prepared(
    given: list[Sample], old: dict[Key, list[float]], teacher: PreTrainedModel
) -> tuple[TrainSummary, pa.Table]:
    """The batch of the samples: `old` are the reference's log-probs too, which teaches nothing here."""
    keys = [sample.key for sample in given]
    columns: dict[str, Any] = {
        "prompt_ids": [one.prompt for one in given],
        "response_ids": [one.response for one in given],
    }
    rollouts = rollout_table(keys, [len(sample.response) for sample in given], **columns)
    taught = [number for number, (uid, _) in enumerate(keys) if SOURCES[uid] == "chat"]
    plan = RankPlan((tuple(taught),) if taught else (), total_loss_tokens=1, total_sequences=1)
    _, scored = score_plan(CausalLogprobs(teacher, 1.0), plan, [rollouts], TEACHER, "cpu", TopTokens(K))
    tables = [
        rollouts,
        reward_table(keys, [sample.reward for sample in given]),
        scores("old_logprobs", keys, [old[key] for key in keys]),
        scores("ref_logprobs", keys, [old[key] for key in keys]),
        *([scored] if taught else []),
    ]
    uids = {uid for uid, _ in keys}
    teachers = {uid: {TEACHER: WEIGHT} if SOURCES[uid] == "chat" else {} for uid in uids}
    algorithms = {uid: "chat" for uid in uids if SOURCES[uid] == "chat"}
    request = PrepareRequest(tuple(keys), teachers=teachers, algorithms=algorithms)
    return prepare(GROUP, request, tables, {"chat": NONE})


def loop(
    exact: PreTrainedModel, teacher: PreTrainedModel, given: list[Sample], old: dict[Key, list[float]], divergence: str
) -> torch.Tensor:
    config, loss = config_of(divergence), torch.zeros((), dtype=torch.double)
    for sample in given:
        if SOURCES[sample.key[0]] == "maths":
            rewards = [other.reward for other in given if other.key[0] == sample.key[0]]
            advantage = (sample.reward - fmean(rewards)) / (stdev(rewards) + STD_EPS)
            ratio = (exact_logprobs(exact, sample) - torch.tensor(old[sample.key], dtype=torch.double)).exp()
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum()
        else:
            ids, start = torch.tensor([sample.prompt + sample.response]), len(sample.prompt) - 1
            student = exact(ids).logits[0, start:-1]
            with torch.no_grad():
                its = teacher(ids).logits[0, start:-1]
            loss = loss + COEF * WEIGHT * plainly(student, its, config.distill).sum()
    return loss / sum(len(sample.response) for sample in given)


def found(model: PreTrainedModel, table: pa.Table, plans: list[RankPlan], config: PolicyLossConfig) -> list[LossOutput]:
    """The losses of the micro-batches of all ranks."""
    tokens, module, outputs = TokenTable(table), CausalLogprobs(model, temperature=1.0, chunks=2), list[LossOutput]()
    for plan in plans:
        for rows in plan.micro_batches:
            batch = tokens.cut(rows, plan)
            stored = tokens.teachers(batch)
            assert stored is not None
            logprobs, entropy, divergences = module(batch=batch, reader=TopTeacher(*stored, config.distill))
            inputs = policy_tokens(tokens, batch, plan, config, 6, logprobs, entropy)
            outputs.append(policy_loss(replace(inputs, divergences=divergences), config))
    return outputs


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jensen_shannon", "skewed"])
@pytest.mark.parametrize(("uids", "budget"), [("abc", 4096), ("abc", 24), ("ac", 24), ("b", 24)])
def test_a_batch_has_the_gradients_of_its_taught_and_of_its_rewarded_sources(
    uids: str, budget: int, divergence: str
) -> None:
    """In micro-batches of one source or both, and in batches that have only one of them."""
    model, given = small_model(), [sample for sample in samples() if sample.key[0] in uids]
    teacher = small_model()
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    exact = copy.deepcopy(model).double()
    old = old_logprobs(exact, given)
    summary, table = prepared(given, old, teacher)
    plans = plan_update(summary.rows, range(len(summary.rows)), 2, budget, skip_zero_advantage=False)
    outputs = found(model, table, plans, config_of(divergence))
    loss = torch.stack([one.loss for one in outputs]).sum()
    expected = loop(exact, copy.deepcopy(teacher).double(), given, old, divergence)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)
    weights = [any(row) for row in table[TEACHER_WEIGHTS.name].to_pylist()]
    assert weights == [SOURCES[sample.key[0]] == "chat" for sample in given]
    assert (f"kl_{TEACHER}" in summary.metrics) == ("b" in uids) and "kl_ref" in summary.metrics

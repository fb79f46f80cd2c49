"""RAFT with answers from other sources: the policy is fine-tuned on the best of its samples and of the candidates.

The reference is a loop in float64 written from RAFT (arXiv 2304.06767, alg. 1): the mean over groups of the mean
negative log-likelihood of the best response, one sequence at a time.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.algorithms.test_train_batch import reward_table, rollout_table, scores
from tests.workers.algorithms.test_truncated import Sample, exact_logprobs, loss_of, samples, small_model
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.messages import PrepareRequest

RAFT = ALGORITHMS["raft"]
NAN = math.nan


def given() -> tuple[list[Sample], list[Sample]]:
    """Three groups of four samples, and candidates: two better ones, none, and a worse one."""
    own = samples()
    prompts = {sample.key[0]: sample.prompt for sample in own}
    best = {uid: max(s.reward for s in own if s.key[0] == uid) for uid in "abc"}
    candidates = [
        Sample(("a", 4), prompts["a"], [7, 8, 9, 2], best["a"] + 0.5, False),
        Sample(("a", 5), prompts["a"], [11, 2], best["a"] + 1.0, False),
        Sample(("c", 4), prompts["c"], [5, 2], best["c"] - 1.0, False),
    ]
    return own, candidates


def reference(exact: PreTrainedModel, everything: list[Sample]) -> torch.Tensor:
    """Mean over groups of -log pi per token of the best response."""
    losses = []
    for _, group in itertools.groupby(sorted(everything, key=lambda s: s.key), key=lambda s: s.key[0]):
        best = max(group, key=lambda sample: sample.reward)
        losses.append(-exact_logprobs(exact, best).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_and_its_gradient_are_the_likelihood_of_the_best_responses(
    shared: bool, ranks: int, budget: int
) -> None:
    own, candidates = given()
    everything = own + candidates
    keys = [sample.key for sample in everything]
    columns: dict[str, Any] = {
        "prompt_ids": [list(sample.prompt) for sample in everything],
        "response_ids": [list(sample.response) for sample in everything],
        "rollout_logprobs": [[-1.0 if s in own else NAN] * len(s.response) for s in everything],
    }
    tables = [
        rollout_table(keys, [len(sample.response) for sample in everything], 0, **columns),
        reward_table(keys, [sample.reward for sample in everything]),
    ]
    request = PrepareRequest(tuple(keys), candidates=tuple(sample.key for sample in candidates))
    summary, table = prepare(RAFT.advantage, request, tables)
    assert sum(row.has_signal for row in summary.rows) == 3
    model = small_model()
    exact = copy.deepcopy(model).double()
    # Every row is computed: the others have weight 0.
    rows = range(len(summary.rows))
    plans = plan_update(summary.rows, rows, ranks, budget, skip_zero_advantage=False, share_prompts=shared)
    loss, expected = loss_of(model, table, plans, RAFT.loss), reference(exact, everything)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)


def test_metrics_of_a_batch_are_those_of_the_policys_own_samples() -> None:
    own, candidates = given()
    both = own + candidates

    def metrics_of(some: list[Sample], foreign: list[Sample]) -> dict[str, float]:
        keys = [sample.key for sample in some]
        columns: dict[str, Any] = {
            "response_ids": [list(sample.response) for sample in some],
            "rollout_logprobs": [[NAN if s in foreign else -2.0] * len(s.response) for s in some],
        }
        tables = [
            rollout_table(keys, [len(sample.response) for sample in some], 0, **columns),
            reward_table(keys, [sample.reward for sample in some]),
            scores("ref_logprobs", keys, [[-1.0 if s in foreign else -2.5] * len(s.response) for s in some]),
        ]
        request = PrepareRequest(tuple(keys), candidates=tuple(sample.key for sample in foreign))
        return prepare(RAFT.advantage, request, tables)[0].metrics

    names = ("perplexity", "repetition", "kl_ref")
    with_candidates, alone = metrics_of(both, candidates), metrics_of(own, [])
    assert {name: with_candidates[name] for name in names} == {name: alone[name] for name in names}


def test_unknown_log_probs_are_refused_in_a_sample_of_the_policy() -> None:
    own, _ = given()
    keys = [sample.key for sample in own]
    columns: dict[str, Any] = {"rollout_logprobs": [[NAN] * len(s.response) for s in own]}
    tables = [
        rollout_table(keys, [len(sample.response) for sample in own], 0, **columns),
        reward_table(keys, [sample.reward for sample in own]),
    ]
    with pytest.raises(ValueError, match=r"a\[0\]: rollout_logprobs has nan"):
        prepare(RAFT.advantage, PrepareRequest(tuple(keys)), tables)


def test_other_estimators_refuse_candidates() -> None:
    own, candidates = given()
    keys = tuple(sample.key for sample in (*own, *candidates))
    request = PrepareRequest(keys, candidates=tuple(sample.key for sample in candidates))
    with pytest.raises(ValueError, match="the group estimator needs samples of the policy, not candidates"):
        prepare(AdvantageConfig(estimator="group"), request, [])

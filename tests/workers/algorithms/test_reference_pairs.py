"""XPO: the loss of a batch of pairs and its gradient, against a loop over the pairs in float64.

The reference is written from XPO (arXiv 2405.21046, alg. 1), one sequence at a time: the mean over pairs of
-log sigmoid(beta (log-ratio of the better response - log-ratio of the worse one)) + alpha log pi(y'), y' the
reference's response.
"""

from __future__ import annotations

import copy
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.algorithms.test_train_batch import reward_table, rollout_table, scores
from tests.workers.algorithms.test_truncated import Sample, exact_logprobs, loss_of, samples, small_model
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.messages import PrepareRequest, TrainSummary

XPO = ALGORITHMS["xpo"]
BETA, ALPHA = 0.7, 0.05
ADVANTAGE = XPO.advantage.model_copy(update={"dpo_beta": BETA, "exploration_coef": ALPHA})
NAN = float("nan")
LOST = {("b", 1), ("c", 6)}
"""A sample of the policy and a response of the reference that have no reward: their partners are in no pair."""


def batch() -> tuple[list[Sample], list[Sample]]:
    """Three groups of four samples, and the reference's responses, which follow them; one is as good as its partner."""
    own = samples()
    prompts = {sample.key[0]: sample.prompt for sample in own}
    rewards = {sample.key: sample.reward for sample in own}
    others = [
        Sample(
            (uid, 4 + n), prompts[uid], [5 + n, 9, 3 + n, 2][n % 2 :], rewards[uid, n] + (0.3, -0.2, 0.0, 0.1)[n], False
        )
        for uid in "abc"
        for n in range(4)
    ]
    return own, others


def reference(
    exact: PreTrainedModel, ratios: dict[Any, torch.Tensor], own: list[Sample], others: list[Sample]
) -> torch.Tensor:
    """The mean over pairs of XPO's loss."""
    losses = []
    for one, two in zip(own, others, strict=True):
        if LOST & {one.key, two.key}:
            continue
        loss = ALPHA * exact_logprobs(exact, two).sum()
        if one.reward != two.reward:
            better, worse = (one, two) if one.reward > two.reward else (two, one)
            h = [exact_logprobs(exact, s).sum() - ratios[s.key].sum() for s in (better, worse)]
            loss = loss - torch.sigmoid(BETA * (h[0] - h[1])).log()
        losses.append(loss)
    return torch.stack(losses).mean()


def prepared(
    model: PreTrainedModel, ref: dict[Any, torch.Tensor], own: list[Sample], others: list[Sample]
) -> tuple[TrainSummary, pa.Table]:
    kept = [sample for sample in (*own, *others) if sample.key not in LOST]
    keys = [sample.key for sample in kept]
    with torch.no_grad():
        old = [exact_logprobs(model, sample).tolist() for sample in kept]
    columns: dict[str, Any] = {
        "prompt_ids": [list(sample.prompt) for sample in kept],
        "response_ids": [list(sample.response) for sample in kept],
        "rollout_logprobs": [[-1.0 if s in own else NAN] * len(s.response) for s in kept],
    }
    tables = [
        rollout_table(keys, [len(sample.response) for sample in kept], 0, **columns),
        reward_table(keys, [sample.reward for sample in kept]),
        scores("old_logprobs", keys, old),
        scores("ref_logprobs", keys, [ref[key].tolist() for key in keys]),
    ]
    foreign = tuple(sample.key for sample in kept if sample in others)
    return prepare(ADVANTAGE, PrepareRequest(tuple(keys), candidates=foreign, compared=dict.fromkeys("abc", 4)), tables)


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_the_first_update_has_the_gradient_of_xpo_s_loss(layout: str, ranks: int, budget: int) -> None:
    own, others = batch()
    model = small_model()
    exact = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(5)
    ref = {}
    for sample in (*own, *others):
        logprobs = exact_logprobs(exact, sample).detach()
        ref[sample.key] = (logprobs + 0.5 * torch.randn(len(logprobs), generator=generator)).float().double()
    summary, table = prepared(exact, ref, own, others)
    packed, shared = layout != "padded", layout == "shared"
    how: dict[str, Any] = {"skip_zero_advantage": True, "packed": packed, "share_prompts": shared}
    plans = plan_update(summary.rows, range(len(summary.rows)), ranks, budget, **how)
    assert (plans[0].packed, plans[0].shared) == (packed, shared)
    loss_of(model, table, plans, XPO.loss).backward()
    reference(exact, ref, own, others).backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=2e-6)


def test_a_response_without_a_partner_has_no_advantage_and_a_tie_explores_alone() -> None:
    own, others = batch()
    model = small_model().double()
    ref = {s.key: torch.zeros(len(s.response)) for s in (*own, *others)}
    summary, table = prepared(model, ref, own, others)
    keys = zip(table.column("prompt_uid").to_pylist(), table.column("sample_index").to_pylist(), strict=True)
    found = dict(zip(keys, table.column("advantages").to_pylist(), strict=True))
    sequences, pairs = 22, 10
    assert len(summary.rows) == sequences
    for key in (("b", 5), ("c", 2)):
        assert set(found[key]) == {0.0}
    for uid in "ab":
        assert set(found[uid, 2]) == {0.0}
        assert found[uid, 6] == pytest.approx([-ALPHA * sequences / pairs] * len(found[uid, 6]))


def test_pairs_need_the_number_of_samples_and_the_reference_s_log_probs() -> None:
    own, others = batch()
    keys = tuple(sample.key for sample in (*own, *others))
    tables = [
        rollout_table(list(keys), [len(s.response) for s in (*own, *others)], 0),
        reward_table(list(keys), [s.reward for s in (*own, *others)]),
    ]
    with pytest.raises(ValueError, match="needs old_logprobs and ref_logprobs"):
        prepare(ADVANTAGE, PrepareRequest(keys, compared=dict.fromkeys("abc", 4)), tables)
    logprobs = [[-1.0] * len(s.response) for s in (*own, *others)]
    tables += [scores(name, list(keys), logprobs) for name in ("old_logprobs", "ref_logprobs")]
    with pytest.raises(ValueError, match="needs the reference's responses"):
        prepare(ADVANTAGE, PrepareRequest(keys), tables)

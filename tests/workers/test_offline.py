"""Offline trainers, without DeepSpeed and other ranks: what they read from their models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from troupe.workers import offline
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.contract.offline_config import ExampleConfig, KtoLossConfig, ProcessLossConfig, RewardLossConfig
from troupe.workers.contract.offline_messages import EXAMPLE_BATCH
from troupe.workers.data.examples import ExampleTable
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import RewardScores, load_value
from troupe.workers.offline import ExamplePolicyWorker, RewardTrainer

TOKENS = 700


def batch(rows: int) -> pa.Table:
    """KTO's: every row with its mismatched one, with log-probs of a reference."""
    generator = torch.Generator().manual_seed(3)
    columns = []
    for row in range(2 * rows):
        ids = torch.randint(2, 20, (TOKENS,), generator=generator).tolist()
        logprobs = (-3.0 - torch.rand(TOKENS, generator=generator)).tolist()
        columns.append(
            {
                "prompt_uid": str(row // 2),
                "sample_index": row % 2,
                "attempt": 0,
                "prompt_ids": [1],
                "response_ids": ids,
                "loss_mask": [True] * TOKENS,
                "score": -float(row % 2),
                "margin": 0.0,
                "desirable": True,
                "ref_logprobs": logprobs,
            }
        )
    return pa.Table.from_pylist(columns, schema=EXAMPLE_BATCH)


def bare(kind: type[Any], **fields: Any) -> Any:
    """A worker that has only these fields."""
    worker = object.__new__(kind)
    vars(worker).update(fields)
    return worker


def test_the_reference_point_of_kto_is_summed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 log-probs, over micro-batches: the exact mean of their differences."""
    table, reduced = ExampleTable(batch(6)), []

    def logprobs_of(targets: torch.Tensor) -> torch.Tensor:
        return -3.0 * torch.sin(targets.float()).abs()

    def all_reduce(values: Mapping[str, float], device: str, operation: str) -> dict[str, float]:
        reduced.append(operation)
        return dict(values)

    monkeypatch.setattr(offline, "all_reduce", all_reduce)
    worker = bare(
        ExamplePolicyWorker,
        _config=SimpleNamespace(
            examples=ExampleConfig(max_length=8, micro_batch_tokens=8, mismatched=True), loss=KtoLossConfig()
        ),
        _engine=SimpleNamespace(device=torch.device("cpu")),
        _device="cpu",
    )
    plan = RankPlan(((0, 1, 2, 3), (4, 5, 6, 7, 8, 9), (10, 11), ()), 0, 6)
    module: Any = lambda batch, reader: (logprobs_of(batch.targets), None)  # noqa: E731
    found = worker._reference_point(module, plan, table)
    rows = [row for row in batch(6).to_pylist() if row["sample_index"] == 1]
    wanted = math.fsum(
        float(logprob) - reference
        for row in rows
        for logprob, reference in zip(
            logprobs_of(torch.tensor(row["response_ids"])).tolist(), row["ref_logprobs"], strict=True
        )
    )
    wanted /= len(rows)
    assert wanted > 0.0
    assert found == pytest.approx(wanted, rel=1e-14)
    assert reduced == ["sum"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["sequence", "token", "step"])
def test_scores_of_tokens_are_read_where_the_loss_compares_them(tiny_model: Path, level: Any, packed: bool) -> None:
    """At every response token, which of the last one is the sequence's; nowhere for an empty micro-batch."""
    torch.manual_seed(0)
    model = load_value(ModelConfig(path=str(tiny_model), dtype="float32")).eval()
    torch.nn.init.normal_(model.get_submodule("score").state_dict()["weight"], std=0.5)
    module, plan = RewardScores(model), RankPlan((), 0, 0, packed=packed)
    assert adapt(module, model, "cpu", packing=packed) == packed
    loss = ProcessLossConfig() if level == "step" else RewardLossConfig(level=level)
    worker = bare(RewardTrainer, _config=SimpleNamespace(loss=loss))
    steps = [False, True, True, False, True]
    pairs = pa.Table.from_pylist(
        [
            row
            | {"response_ids": row["response_ids"][:length], "ref_logprobs": None}
            | {"loss_mask": steps[-length:] if level == "step" else [True] * length}
            for row, length in zip(batch(2).to_pylist(), (3, 5, 4, 2), strict=True)
        ],
        schema=EXAMPLE_BATCH,
    )
    for rows in (range(4), ()):
        with torch.no_grad():
            scored = worker._scored(module, ExampleTable(pairs).cut(rows, plan, "cpu"), 0.0)
        assert scored.rewards.shape == (len(rows),)
        if level == "token" and rows:
            assert scored.token_rewards.shape == (14,)
            assert torch.allclose(scored.token_rewards[[2, 7, 11, 13]], scored.rewards, atol=1e-6)
        elif level == "step" and rows:
            assert scored.token_rewards.shape == (9,)  # 2, 3, 3 and 1 ends of steps
            assert torch.allclose(scored.token_rewards[[1, 4, 7, 8]], scored.rewards, atol=1e-6)
        else:
            assert scored.token_rewards.shape == (0,)

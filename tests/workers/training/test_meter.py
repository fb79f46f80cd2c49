"""Throughput of an update on ranks whose GPUs differ, and the operations of a token, without a GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.models.modeling import ModelModule
from troupe.workers.training import meter
from troupe.workers.training.adapter import Adapter
from troupe.workers.training.meter import UpdateMeter, operations

PARAMETERS = 10**9


def metrics_of_ranks(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> list[dict[str, float]]:
    """What each rank reports that has one of these GPUs, after a second in which all ranks have trained on nothing."""
    given: list[dict[str, float]] = []
    monkeypatch.setattr(meter.dist, "get_world_size", lambda: len(gpus))
    monkeypatch.setattr(meter, "operations", lambda module: 6 * PARAMETERS)

    def contribute(values: dict[str, float], device: str, operation: str) -> dict[str, float]:
        if operation == "sum":
            given.append(values | {"tokens": 500.0})
        return {"seconds": 1.0} | dict.fromkeys(values, 1.0)

    def reduced(values: dict[str, float], device: str, operation: str) -> dict[str, float]:
        if operation == "max":
            return {"seconds": 1.0}
        return {name: sum(one[name] for one in given) for name in values}

    reports = []
    for exchange in (contribute, reduced):  # first what every rank gives, then what each makes of the sums
        monkeypatch.setattr(meter, "all_reduce", exchange)
        reports = []
        for gpu in gpus:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
            reports.append(UpdateMeter(cast(Any, None), "cuda").metrics())
    return reports


def test_ranks_with_different_gpus_report_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that report different values are taken for diverged."""
    first, second = metrics_of_ranks(monkeypatch, "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    mean_peak = (312e12 + 989e12) / 2
    assert first == second
    assert first["mfu"] == pytest.approx(6 * PARAMETERS * 500.0 / mean_peak)


def test_a_gpu_whose_peak_is_unknown_leaves_no_rank_with_a_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = metrics_of_ranks(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 9999")
    assert first == second
    assert "mfu" not in first and first["tokens_per_s"] == 500.0


def test_frozen_weights_cost_no_gradient_of_their_own() -> None:
    """Six operations for each trained number, four for each frozen one, none for the embedding that is looked up.

    By hand, for a Llama of one layer: q and o of 8 x 8, k and v of 8 x 4, three matrices of 8 x 16, three norms of 8,
    a head of 32 x 8; adapters of rank 2 on q (2 x (8 + 8)) and v (2 x (8 + 4)).
    """
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, tie_word_embeddings=False)
    module = ModelModule()
    module.model = LlamaForCausalLM(config)
    used, adapters = 2 * 64 + 2 * 32 + 3 * 128 + 3 * 8 + 256, 2 * 16 + 2 * 12
    assert operations(module) == 6 * used
    Adapter(module.model, LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    assert operations(module) == 4 * used + 6 * adapters

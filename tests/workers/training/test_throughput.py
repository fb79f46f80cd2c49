"""Throughput of an update on ranks whose GPUs differ, without a GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from troupe.workers.training import throughput
from troupe.workers.training.throughput import PEAK_FLOPS, UpdateMeter

PARAMETERS = 10**9


def metrics_of_ranks(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> list[dict[str, float]]:
    """What each rank reports that has one of these GPUs, after a second in which all ranks have trained on nothing."""
    given: list[dict[str, float]] = []
    monkeypatch.setattr(throughput.dist, "get_world_size", lambda: len(gpus))
    monkeypatch.setattr(throughput, "used_parameters", lambda module: PARAMETERS)

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
        monkeypatch.setattr(throughput, "all_reduce", exchange)
        reports = []
        for gpu in gpus:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
            reports.append(UpdateMeter(cast(Any, None), "cuda").metrics())
    return reports


def test_ranks_with_different_gpus_report_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that report different values are taken for diverged."""
    first, second = metrics_of_ranks(monkeypatch, "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    mean_peak = (PEAK_FLOPS["A100"] + PEAK_FLOPS["H100"]) / 2
    assert first == second
    assert first["mfu"] == pytest.approx(6 * PARAMETERS * 500.0 / mean_peak)


def test_a_gpu_whose_peak_is_unknown_leaves_no_rank_with_a_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = metrics_of_ranks(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 9999")
    assert first == second
    assert "mfu" not in first and first["tokens_per_s"] == 500.0

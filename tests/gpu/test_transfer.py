"""Weights from device to device to two engines: a trainer's failure and an engine's loss in a transfer, CUDA graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.gpu.engines import Transfers
from tests.gpu.isolated import Measurements, isolated
from troupe.workers.contract.weight_backends import TransferBackend


@pytest.mark.long
def test_the_next_transfer_after_a_failure_reaches_both_engines_on_the_cpu(
    tiny_model: Path, measured: Callable[[Measurements], None]
) -> None:
    measured(measure("gloo", "eager", str(tiny_model)))


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        pytest.param("ipc", "eager", marks=pytest.mark.gpu),
        pytest.param("ipc", "compiled", marks=pytest.mark.gpu),
        pytest.param("nccl", "eager", marks=pytest.mark.gpu(3)),
    ],
)
def test_the_next_transfer_after_a_failure_reaches_both_engines(
    backend: str, mode: str, demo_model: Path, tmp_path: Path, measured: Callable[[Measurements], None]
) -> None:
    measured(isolated(tmp_path, measure, backend, mode, str(demo_model)))


def measure(backend: str, mode: str, model: str) -> Measurements:
    """Send, fail, and send again."""
    transfers = Transfers(Path(model), cast("TransferBackend", backend), eager=mode == "eager")
    return asyncio.run(transfers.measure())

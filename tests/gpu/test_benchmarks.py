"""Benchmarks, which check what they measure: weight sync, sampling, and updates with packed rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.packing import parse as parse_packing
from benchmarks.rollout_throughput import parse as parse_rollout
from benchmarks.support.workload import on_device
from benchmarks.weight_sync import parse as parse_weight_sync
from tests.conftest import ROOT
from tests.gpu.isolated import Measurements, finish
from tests.real.commands import Command
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.load import load_rollout_spec

_TINY = ("--model", ".cache/models/tiny-llama", "--dtype", "float32", "--turns", "1")
SYNC_ON_CPU = ("weight_sync", *_TINY, "--samples", "2", "--max-tokens", "4")
PACKING_ON_CPU = ("packing", *_TINY, "--groups", "2", "--threads", "1")
IPC = ("weight_sync", "--device", "cuda", "--backend", "ipc")
NCCL = ("weight_sync", "--device", "cuda", "--backend", "nccl", "--turns", "1")
PACKING = ("packing", "--device", "cuda", "--micro-batch-tokens", "8192", "--groups", "32")
ROLLOUT = ("rollout_throughput", "--device", "cuda", "--baseline", "AsyncLLM", "--turns", "5")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(SYNC_ON_CPU, marks=pytest.mark.long, id="weight sync, CPU"),
        pytest.param(PACKING_ON_CPU, marks=pytest.mark.long, id="packing, CPU"),
        pytest.param(IPC, marks=pytest.mark.gpu, id="weight sync, ipc"),
        pytest.param(NCCL, marks=pytest.mark.gpu(2), id="weight sync, nccl"),
        pytest.param(PACKING, marks=pytest.mark.gpu, id="packing"),
        pytest.param(ROLLOUT, marks=pytest.mark.gpu, id="rollout"),
    ],
)
def test_benchmark(arguments: tuple[str, ...], tmp_path: Path, measured: Callable[[Measurements], None]) -> None:
    module, *given = arguments
    file = tmp_path / "measurements.json"
    finish(Command(tmp_path, [sys.executable, "-m", f"benchmarks.{module}", *given, "--json", str(file)]))
    document = json.loads(file.read_text())
    found: dict[str, float | str] = {name: str(outcome) for name, outcome in document["checks"].items()}
    for contender, spreads in document["summary"].items():
        for key, spread in spreads.items():
            if key.endswith(("_per_s", "ratio")) or key == "wall_s":
                found[f"{contender}: {key}"] = spread["median"]
    assert found[f"{next(iter(document['summary']))}: wall_s"]
    measured(found)


@pytest.mark.parametrize("arguments", [IPC, NCCL])
def test_weight_sync_accepts_its_arguments(arguments: tuple[str, ...]) -> None:
    given = parse_weight_sync(arguments[1:])
    spec = load_rollout_spec(ROOT / "deploy/specs/tiny-grpo.yaml", [])
    assert resolved_backend(on_device(spec, given.device, given.backend)) == given.backend


def test_the_other_benchmarks_accept_their_arguments() -> None:
    assert parse_packing(PACKING[1:]).device == parse_rollout(ROLLOUT[1:]).device == "cuda"

"""The GPU check: what a call runs, how pieces end, the results file and its page. No GPU is needed."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.packing import parse as parse_packing
from benchmarks.support.workload import on_device
from benchmarks.weight_sync import parse as parse_weight_sync
from deploy.gpu_check import __main__ as gpu_check
from deploy.gpu_check import agreement, large, sleep, training
from deploy.gpu_check.outcome import NotRight
from deploy.gpu_check.pieces import PIECES, Command, Piece, decide
from deploy.gpu_check.processes import run_commands
from deploy.gpu_check.record import PieceResult, Record, page, read
from tests.conftest import ROOT
from troupe.orchestrator.capacity.nvidia import Graphics
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import Sleep
from troupe.workers.engine.rest import StaleWake
from troupe.workers.weights.buckets import BUCKET_BYTES

BY_NAME = {piece.name: piece for piece in PIECES}
RECORD = Record(
    "gpu",
    {"cpu": "a CPU", "gpus": ["a GPU, 80 GiB"], "driver": "1.2"},
    {"torch": "2"},
    {
        "install": PieceResult("install", "it works", "passed", "", 12.5, "2026-01-01T00:00:00+00:00", {"error": 0.25}),
        "ipc": PieceResult(
            "ipc", "sync", "failed", "exited | 1", 3.0, "2026-01-01T00:00:00+00:00", {}, ("last", "line")
        ),
        "nccl": PieceResult("nccl", "sync", "skipped", "needs 2 GPUs: 1 visible"),
    },
)


def skipped(gpus: int, on_cpu: bool = False, gib: float = 80.0) -> dict[str, str]:
    decisions = decide(PIECES, [gib] * gpus, on_cpu, (), False)
    return {one.piece.name: one.skipped for one in decisions if not one.commands}


def test_pieces_end_within_ten_minutes_and_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(PIECES)
    assert all(piece.bound_s <= 560 for piece in PIECES)  # the rest is for the orderly shutdown
    assert all(piece.on_gpu for piece in PIECES)


def test_what_a_machine_cannot_run_is_skipped_with_the_reason() -> None:
    assert skipped(4) == {}
    assert skipped(1)["nccl"] == "needs 2 GPUs: 1 visible"
    assert skipped(4, gib=24.0) == {"large": "needs a GPU of 78 GiB: 24 GiB visible"}
    assert skipped(0)["install"] == "needs 1 GPU: no NVIDIA GPU is visible"
    assert set(skipped(0)) == set(BY_NAME)
    assert set(skipped(0, on_cpu=True)) == {"adapters", "ipc", "nccl", "transfer-nccl", "grpo-graphs", "sleep"}


class Resting:
    """An engine that rests, and wakes in the right or in the wrong order."""

    def __init__(self, *, stale: bool) -> None:
        self.stale = stale

    async def rest(self) -> None:
        return None

    async def wake(self) -> None:
        if not self.stale:
            raise StaleWake("discarded")


class FakedSleep(sleep.SleepCheck):
    """The sleep check on an engine without memory of its own."""

    def __init__(self, level: Sleep, *, stale: bool = False) -> None:
        self._level = level
        self.measurements = {}
        self.engine = Resting(stale=stale)

    async def start(self, number: int) -> Any:
        return self.engine

    async def send_and_check(self, label: str) -> None:
        self.measurements[label] = 1.0

    async def gap(self, worker: Any) -> float:
        return 0.01


def run_sleep(monkeypatch: pytest.MonkeyPatch, check: sleep.SleepCheck, *free: int) -> dict[str, float | str]:
    monkeypatch.setattr(sleep, "_free_bytes", iter(free).__next__)
    asyncio.run(check.run())
    return check.measurements


def test_the_sleep_piece_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    stale: Any = FakedSleep("kv_cache", stale=True)
    assert run_sleep(monkeypatch, stale, 100, 20, 80)["share freed"] == 0.75
    assert "update of an engine that rests, s" in run_sleep(monkeypatch, FakedSleep("weights"), 100, 20, 80)
    with pytest.raises(NotRight, match="freed 12%"):
        run_sleep(monkeypatch, FakedSleep("weights"), 100, 20, 30)
    with pytest.raises(NotRight, match="woke without the weights"):
        run_sleep(monkeypatch, FakedSleep("weights", stale=True), 100, 20, 80)


def test_a_piece_that_passed_runs_again_only_when_asked() -> None:
    (kept,) = decide([BY_NAME["grpo"]], [80.0], False, {"grpo"}, again=False)
    assert not kept.commands and not kept.skipped
    (again,) = decide([BY_NAME["grpo"]], [80.0], False, {"grpo"}, again=True)
    assert again.commands == BY_NAME["grpo"].on_gpu


def spec_of(command: Command, tmp_path: Path, overrides: tuple[str, ...] = ()) -> RolloutSpec:
    """The spec of a command that runs one."""
    given = [command[i + 1].replace("{folder}", str(tmp_path)) for i, part in enumerate(command) if part == "--set"]
    return load_rollout_spec(ROOT / command[3], [*given, *overrides])


RUNS = [piece.name for piece in PIECES if piece.kind == "run"]


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_valid_specs_that_fit_the_gpus_of_their_piece(name: str, tmp_path: Path, demo_model: Path) -> None:
    piece, model = BY_NAME[name], ROOT / ".cache/models/tiny-llama"
    spec = spec_of(piece.on_gpu[-1], tmp_path, (f"model.path={model}",) if name == "large" else ())
    assert spec.device == "cuda"
    roles = (spec.roles.rollout, spec.roles.policy, spec.roles.critic)
    assert sum(role.workers * role.gpus for role in roles if role is not None) <= piece.gpus
    assert all(role is None or role.gpus > 0 for role in roles)
    if name == "sequence-parallel":
        heads = json.loads((demo_model / "config.json").read_text())["num_attention_heads"]
        assert heads % spec.roles.policy.sequence_parallel_size == 0 < spec.roles.policy.sequence_parallel_size - 1


def test_runs_send_weights_as_their_pieces_say(tmp_path: Path) -> None:
    model = f"model.path={ROOT / '.cache/models/tiny-llama'}"
    backends = {name: spec_of(BY_NAME[name].on_gpu[-1], tmp_path, (model,)).resolved_backend() for name in RUNS}
    assert backends == {
        **dict.fromkeys(("grpo", "ppo", "adapters", "grpo-graphs"), "shm"),
        "large": "ipc",
        **dict.fromkeys(("tensor-parallel", "zero3", "sequence-parallel"), "nccl"),
    }
    spec = spec_of(BY_NAME["zero3"].on_cpu[-1], tmp_path)
    assert (spec.resolved_backend(), spec.roles.policy.zero_stage, spec.roles.policy.workers) == ("gloo", 3, 2)


@pytest.mark.parametrize("variant", training.VARIANTS, ids=lambda variant: variant.name)
def test_every_way_to_train_is_a_valid_spec(variant: training.Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = training.read_spec(variant, "cuda", ())
    assert (spec.device, spec.model.dtype) == ("cuda", "bfloat16")
    assert f"ZeRO {spec.roles.policy.zero_stage}" in variant.name or "head" in variant.name


def trained(*losses: float, resumed: tuple[float, ...] = (), identical: bool = True) -> training.Trained:
    return training.Trained(losses, resumed or losses[-1:], identical, 1.0, 0.0)


@pytest.mark.parametrize(
    ("found", "device", "words"),
    [
        (trained(2.0, 2.1), "cuda", "did not fall"),
        (trained(2.0, float("nan")), "cuda", "did not fall"),
        (trained(2.0, 1.5), "cuda", "differ from those of ZeRO 0"),
        (trained(2.0, 1.0, resumed=(1.1,)), "cuda", "after a resume"),
        (trained(2.0, 1.0, identical=False), "cpu", "after a resume"),
    ],
)
def test_wrong_training_is_found(found: training.Trained, device: str, words: str) -> None:
    plain = trained(2.0, 1.0)
    training.check("SFT", plain, plain, device)
    training.check("SFT", trained(2.0, 1.0, identical=False), plain, "cuda")
    with pytest.raises(NotRight, match=words):
        training.check("SFT", found, plain, device)


def test_wrong_numerics_are_found() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    exact = agreement.ModelOutputs(ones, {"w": torch.tensor([1.0, 0.0])})
    limits = agreement.TOLERANCES["float32"]
    assert "cosine 1.0" in agreement.check("float32", exact, exact, limits)
    for wrong in (
        agreement.ModelOutputs(ones + 0.01, exact.gradients),
        agreement.ModelOutputs(ones, {"w": torch.tensor([1.0, 0.1])}),
        agreement.ModelOutputs(ones * torch.nan, exact.gradients),
        agreement.ModelOutputs(ones, {}),
    ):
        with pytest.raises(NotRight, match=r"nats per token|of 0 parameters"):
            agreement.check("float32", wrong, exact, limits)


def test_the_large_model_has_a_tensor_above_a_bucket_of_a_transfer() -> None:
    assert 2 * large.VOCABULARY * large.WIDTHS["hidden_size"] > BUCKET_BYTES


@pytest.mark.parametrize("name", ["ipc", "nccl", "sync"])
def test_benchmarks_accept_the_arguments_of_the_pieces(name: str) -> None:
    (command,) = BY_NAME[name].on_gpu
    given = parse_weight_sync(command[2:])
    spec = load_rollout_spec(ROOT / "deploy/specs/tiny-grpo.yaml", [])
    assert on_device(spec, given.device, given.backend).resolved_backend() == given.backend


def test_packing_accepts_the_arguments_of_its_piece() -> None:
    (command,) = BY_NAME["packing"].on_gpu
    assert parse_packing(command[2:]).device == "cuda"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert read(path) is None
    RECORD.write(path)
    assert read(path) == RECORD
    assert set(json.loads(path.read_text())) == {"mode", "machine", "versions", "results"}
    assert path.with_suffix(".md").read_text() == page(RECORD)
    path.write_text('{"results": {}}')
    with pytest.raises(ValueError, match="is not a result of the GPU check"):
        read(path)


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    RECORD.write(path)
    path.write_text(path.read_text().replace('"measurements"', '"figures"'))
    assert read(path) == RECORD


def test_the_page_shows_status_measurements_reasons_and_errors() -> None:
    text = page(RECORD)
    assert "gpus a GPU, 80 GiB" in text
    assert "| install | passed | 12 | it works | error: 0.25 |" in text
    assert "| ipc | failed | 3 | sync | exited \\| 1 |" in text
    assert "| nccl | skipped |  | sync | needs 2 GPUs: 1 visible |" in text
    assert "    last\n    line\n" in text


def test_a_command_that_fails_ends_the_piece(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = run_commands([("-c", "print('told'); raise SystemExit(3)"), ("-c", "print('never')")], 60, log, tmp_path)
    assert "exited with 3" in ended.failure
    assert "\ntold\n" in log.read_text() and "\nnever\n" not in log.read_text()


def test_a_command_over_its_bound_ends_with_processes_that_left_its_group(tmp_path: Path) -> None:
    child = "import time; time.sleep(100)"
    code = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {child!r}], "
    code += "start_new_session=True).pid, flush=True); time.sleep(100)"
    log, began = tmp_path / "log", time.monotonic()
    ended = run_commands([("-c", code)], 3.0, log, tmp_path)
    assert ended.failure == "not done after 3 s"
    assert time.monotonic() - began < 90
    pid = int(log.read_text().splitlines()[-1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_without_a_gpu_all_is_skipped_and_results_of_another_machine_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "graphics", Graphics)
    path = tmp_path / "result.json"
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "no NVIDIA GPU is visible" in capsys.readouterr().err
    found = read(path)
    assert found is not None and {result.status for result in found.results.values()} == {"skipped"}
    RECORD.write(path)
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert read(path) == RECORD
    assert gpu_check.main(["--on-cpu", "--only", "ipc", "--out", str(tmp_path)]) == 2
    assert read(path) == RECORD


def test_a_piece_without_figures_fails(tmp_path: Path) -> None:
    piece = Piece("odd", "writes nothing", "probe", on_gpu=(("-c", "print('done')"),))
    (decision,) = decide([piece], [80.0], False, (), False)
    result = gpu_check.run_piece(decision, tmp_path)
    assert result.status == "failed" and result.reason.startswith("no measurements")
    assert result.error[-1] == "done"
    good = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"x\": 1}')"
    (decision,) = decide(
        [replace(piece, on_gpu=(("-c", good, "{folder}/measurements.json"),))], [80.0], False, (), False
    )
    assert gpu_check.run_piece(decision, tmp_path).measurements == {"x": 1}

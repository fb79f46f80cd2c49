"""The GPU check: what a call runs, how pieces end, the results file and its page. No GPU is needed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.packing import parse as parse_packing
from benchmarks.support.workload import on_device
from benchmarks.weight_sync import parse as parse_weight_sync
from deploy.gpu_check import __main__ as gpu_check
from deploy.gpu_check import sleep
from deploy.gpu_check.pieces import PIECES, Piece, decide
from deploy.gpu_check.processes import run_commands
from deploy.gpu_check.record import Record, Result, page, read
from tests.conftest import ROOT
from troupe.orchestrator.doctor.machine import Graphics
from troupe.orchestrator.spec.load import load_rollout_spec

BY_NAME = {piece.name: piece for piece in PIECES}
RECORD = Record(
    "gpu",
    {"cpu": "a CPU", "gpus": ["a GPU, 80 GiB"], "driver": "1.2"},
    {"torch": "2"},
    {
        "install": Result("install", "it works", "passed", "", 12.5, "2026-01-01T00:00:00+00:00", {"error": 0.25}),
        "ipc": Result("ipc", "sync", "failed", "exited | 1", 3.0, "2026-01-01T00:00:00+00:00", {}, ("last", "line")),
        "nccl": Result("nccl", "sync", "skipped", "needs 2 GPUs: 1 visible"),
    },
)


def skipped(gpus: int, on_cpu: bool = False) -> dict[str, str]:
    return {one.piece.name: one.skipped for one in decide(PIECES, gpus, on_cpu, (), False) if not one.commands}


def test_pieces_end_within_ten_minutes_and_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(PIECES)
    assert all(piece.bound_s <= 560 for piece in PIECES)  # the rest is for the orderly shutdown
    assert all(piece.on_gpu for piece in PIECES)


def test_what_a_machine_cannot_run_is_skipped_with_the_reason() -> None:
    assert skipped(2) == {}
    assert skipped(1)["nccl"] == "needs 2 GPUs: 1 visible"
    assert skipped(0)["install"] == "needs 1 GPU: no NVIDIA GPU is visible"
    assert set(skipped(0)) == set(BY_NAME)
    assert set(skipped(0, on_cpu=True)) == {"ipc", "nccl", "sleep"}


def test_the_sleep_piece_has_the_settings_of_an_engine(tiny_model: Path) -> None:
    given = sleep.arguments(sleep.configuration(tiny_model))
    assert (given["model"], given["enable_sleep_mode"], given["gpu_memory_utilization"]) == (str(tiny_model), True, 0.3)
    assert given["logprobs_mode"] == "processed_logprobs" and given["enforce_eager"]


def test_a_piece_that_passed_runs_again_only_when_asked() -> None:
    (kept,) = decide([BY_NAME["grpo"]], 1, False, {"grpo"}, again=False)
    assert not kept.commands and not kept.skipped
    (again,) = decide([BY_NAME["grpo"]], 1, False, {"grpo"}, again=True)
    assert again.commands == BY_NAME["grpo"].on_gpu


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_demos_on_one_gpu_are_valid_specs_and_fit_it(name: str) -> None:
    (command,) = BY_NAME[name].on_gpu
    overrides = [command[i + 1] for i, part in enumerate(command) if part == "--set"]
    spec = load_rollout_spec(ROOT / command[3], overrides)
    assert (spec.device, spec.resolved_backend()) == ("cuda", "shm")
    roles = (spec.roles.rollout, spec.roles.policy, spec.roles.critic)
    assert sum(role.gpus for role in roles if role is not None) <= 1
    assert all(role is None or role.gpus > 0 for role in roles)


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


def test_the_page_shows_status_figures_reasons_and_errors() -> None:
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
    assert time.monotonic() - began < 30
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
    (decision,) = decide([piece], 1, False, (), False)
    result = gpu_check.run_piece(decision, tmp_path)
    assert result.status == "failed" and result.reason.startswith("no figures")
    assert result.error[-1] == "done"
    good = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"x\": 1}')"
    (decision,) = decide([replace(piece, on_gpu=(("-c", good, "{folder}/figures.json"),))], 1, False, (), False)
    assert gpu_check.run_piece(decision, tmp_path).figures == {"x": 1}

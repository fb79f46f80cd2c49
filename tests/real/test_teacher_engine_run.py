"""A run with a teacher in a vLLM engine ends under its name if it is late, or its scores are not finite."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.real.commands import GRPO, Run, running

pytestmark = [pytest.mark.long, pytest.mark.real, pytest.mark.timeout(1200)]

MODEL = ROOT / ".cache" / "models" / "tiny-teacher"
SHORT = (
    *("schedule.steps=1000", "schedule.prompts_per_step=2", "sampling.max_tokens=8", "checkpoint.every_steps=0"),
    *("algorithm={name: gkd, group_size: 4, distill: {k: 64}}", "roles.policy.learning_rate=1e-3"),
)
SERVED = {"kind": "engine", "cpus": 0.25, "threads": 1, "max_num_seqs": 32, "max_model_len": 160} | {
    "enforce_eager": True,
    "kv_cache_gib": 0.1,
}
WORKER = "teacher.served-0"


def teacher(model: Path = MODEL) -> str:
    """A teacher in an engine."""
    section = {"path": str(model), "dtype": "float32"}
    return f"roles.teacher={json.dumps({'served': SERVED | {'model': section}})}"


def engine_core(run: Run) -> psutil.Process:
    """The process of the teacher's engine, below its worker's."""

    def found() -> psutil.Process | None:
        below = [one for worker in run.processes("ray::TeacherEngine") for one in worker.children(recursive=True)]
        cores = [one for one in run.processes("VLLM::EngineCore") if one in below]
        return cores[0] if len(cores) == 1 else None

    return run.wait_until(found, "one engine of the teacher")


def test_a_late_engine_without_a_restart_left_ends_the_run_under_its_name(tmp_path: Path) -> None:
    """It is stopped; `failures.stopped_s` would find it later than the bound of the call."""
    bounds = ("schedule.score_timeout_s=8", "failures.stopped_s=300", "failures.reference_restarts=0")
    with running(Run(tmp_path, GRPO, *SHORT, teacher(), *bounds, name="late")) as late:
        late.wait_for_step(2)
        engine_core(late).send_signal(signal.SIGSTOP)
        assert late.wait(240) == 1, late.output
        assert late.leftover_processes() == []
    said = " ".join(late.error_lines)
    for part in (WORKER, "score", "8 s", "reference_restarts"):
        assert part in said, late.output


def test_scores_that_are_not_finite_end_the_run_under_the_name_of_the_teacher(tmp_path: Path) -> None:
    model = tmp_path / "teacher"
    shutil.copytree(MODEL, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with running(Run(tmp_path, GRPO, *SHORT, teacher(model), name="broken")) as broken:
        assert broken.wait(300) == 1, broken.output
        assert broken.leftover_processes() == [] and broken.metrics == []
    assert "teacher.served: the score of a token is not finite" in broken.stderr, broken.output

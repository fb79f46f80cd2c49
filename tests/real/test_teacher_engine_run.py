"""A teacher in a vLLM engine beside the same model in a plain worker, on the real stack: the same scores, also of an
engine that was killed or stopped, and an end with its name if the engine is late or its scores are not finite."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.real.commands import GRPO, Run, interrupt, ledger_balances, running

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


def teachers(model: Path = MODEL, **others: Any) -> str:
    """A teacher in an engine, and others beside it."""
    section = {"path": str(model), "dtype": "float32"}
    return f"roles.teacher={json.dumps({'served': SERVED | {'model': section}, **others})}"


def engine_core(run: Run) -> psutil.Process:
    """The process of the teacher's engine, below its worker's."""

    def found() -> psutil.Process | None:
        below = [one for worker in run.processes("ray::TeacherEngine") for one in worker.children(recursive=True)]
        cores = [one for one in run.processes("VLLM::EngineCore") if one in below]
        return cores[0] if len(cores) == 1 else None

    return run.wait_until(found, "one engine of the teacher")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    plain = {"cpus": 0.25, "threads": 1, "model": {"path": str(MODEL), "dtype": "float32"}}
    both = (teachers(plain=plain), "failures.reference_restarts=3", "failures.stopped_s=5")
    with running(Run(tmp_path_factory.mktemp("taught"), GRPO, *SHORT, *both, name="taught")) as started:
        started.wait_for_step(3)
        yield started


def divergences(run: Run) -> list[tuple[float, float]]:
    """KL(policy || teacher) of each step by both teachers."""
    return [(line["kl_teacher.served"], line["kl_teacher.plain"]) for line in run.metrics]


def test_an_engine_and_a_plain_worker_give_the_same_divergence(run: Run) -> None:
    found = divergences(run)
    assert len(found) >= 3 and all(served == pytest.approx(plain, rel=1e-4) and plain > 0.01 for served, plain in found)
    assert len({plain for _, plain in found}) == len(found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_lost_engine_of_a_teacher_is_replaced(run: Run, number: signal.Signals) -> None:
    core, said = engine_core(run), len(run.stderr)
    core.send_signal(number)
    run.wait_until(lambda: f"{WORKER} is lost" in run.stderr[said:], "the loss")
    run.wait_until(lambda: f"{WORKER} was replaced and serves again" in run.stderr[said:], "the replacement")
    step = run.metrics[-1]["step"]
    run.wait_for_step(step + 3)
    assert not core.is_running() and engine_core(run).pid != core.pid
    assert all(served == pytest.approx(plain, rel=1e-4) for served, plain in divergences(run))
    assert all(ledger_balances(line) and line["ledger/dropped"] == 0 for line in run.metrics)


def test_nothing_is_left_of_the_run(run: Run) -> None:
    interrupt(run)
    assert run.wait(120) == 130, run.output
    assert run.leftover_processes() == [] and run.weight_files == []
    assert run.steps() == list(range(1, len(run.steps()) + 1))


def test_a_late_engine_without_a_restart_left_ends_the_run_under_its_name(tmp_path: Path) -> None:
    """It is stopped; `failures.stopped_s` would find it later than the bound of the call."""
    bounds = ("schedule.score_timeout_s=8", "failures.stopped_s=300", "failures.reference_restarts=0")
    with running(Run(tmp_path, GRPO, *SHORT, teachers(), *bounds, name="late")) as late:
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
    with running(Run(tmp_path, GRPO, *SHORT, teachers(model), name="broken")) as broken:
        assert broken.wait(300) == 1, broken.output
        assert broken.leftover_processes() == [] and broken.metrics == []
    assert "teacher.served: the score of a token is not finite" in broken.stderr, broken.output

"""Runs with the role `judge`: real Ray and vLLM, scores in the form of the spec, and a judge that is killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import descendants
from tests.real.commands import Run, interrupt, ledger_balances, running, trajectories

TINY = ROOT / "deploy" / "specs" / "tiny-judge.yaml"


@pytest.mark.long
def test_a_judge_scores_every_sample_and_is_replaced_when_it_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the worker, then of its engine. Groups wait for the new one, and nothing is dropped."""
    small = ("roles.judge.model.path=.cache/models/tiny-llama", "sampling.max_tokens=32")
    endless = ("schedule.steps=1000", "failures.health_interval_s=2")
    with running(Run(tmp_path, TINY, *small, *endless, "schedule.prompts_per_step=8", name="killed")) as run:
        run.wait_for_step(1)
        (judge,) = run.processes("JudgeWorker")
        judge.kill()
        run.wait_until(lambda: run.output.count("judge-0 is lost") == 1, "the loss to be noticed")
        run.wait_for_step(run.metrics[-1]["step"] + 2)
        engine_of(run).kill()
        run.wait_until(lambda: run.output.count("judge-0 is lost") == 2, "the loss to be noticed")
        run.wait_for_step(run.metrics[-1]["step"] + 2)
        interrupt(run)
        assert run.wait() == 130, run.output
        assert run.leftover_processes() == []
    for line in run.metrics:
        assert ledger_balances(line) and line["ledger/dropped"] == 0
        table = trajectories(run.out, line["step"]).to_pylist()
        assert len(table) == 32 and {row["status"] for row in table} == {"ok"}
        assert all(round(10 * row["reward"], 6) in range(11) for row in table), "a score from 0 to 10"
    assert run.metrics[0]["workers/judge"] == 1


def engine_of(run: Run) -> psutil.Process:
    """The engine process of the judge."""
    (judge,) = run.processes("JudgeWorker")
    (engine,) = descendants(judge.pid, "EngineCore")
    return engine

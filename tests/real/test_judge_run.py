"""Runs with the role `judge`: real Ray and vLLM, scores in the form of the spec, and a judge that is killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, ledger_balances, running, trajectories

TINY = ROOT / "deploy" / "specs" / "tiny-judge.yaml"


@pytest.mark.real
def test_a_judge_scores_every_sample(tmp_path: Path) -> None:
    with running(Run(tmp_path, TINY, "schedule.steps=1", name="judged")) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    (line,) = run.metrics
    assert ledger_balances(line) and line["ledger/dropped"] == 0 and line["workers/judge"] == 1
    table = trajectories(run.out, 1).to_pylist()
    assert len(table) == 16 and {row["status"] for row in table} == {"ok"}
    assert all(round(10 * row["reward"], 6) in range(11) for row in table), "a score from 0 to 10"


@pytest.mark.long
def test_a_judge_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """SIGKILL of the worker, then of its engine. Groups wait for the new one, and nothing is dropped."""
    endless = ("schedule.steps=1000", "failures.health_interval_s=2")
    with running(Run(tmp_path, TINY, *endless, "schedule.prompts_per_step=8", name="killed")) as run:
        run.wait_for_step(1)
        (judge,) = run.processes("JudgeWorker")
        judge.kill()
        run.wait_until(lambda: run.output.count("judge-0 is lost") == 1, "the loss to be noticed")
        run.wait_for_step(run.metrics[-1]["step"] + 2)
        engine_of(run).kill()
        run.wait_until(lambda: run.output.count("judge-0 is lost") == 2, "the loss to be noticed")
        run.wait_for_step(run.metrics[-1]["step"] + 2)
        for line in run.metrics:
            assert ledger_balances(line) and line["ledger/dropped"] == 0
    assert run.leftover_processes() == []


def engine_of(run: Run) -> psutil.Process:
    """The engine process of the judge."""
    (judge,) = run.processes("JudgeWorker")
    (engine,) = [
        child
        for child in psutil.Process(judge.pid).children(recursive=True)
        if "EngineCore" in child.name() + " ".join(child.cmdline())
    ]
    return engine

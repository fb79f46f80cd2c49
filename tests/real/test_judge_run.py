"""Runs with the role `judge`: real Ray and vLLM, scores in the form of the spec, and engines that are killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import descendants
from tests.real.commands import Run, ledger_balances, running, trajectories

TINY = ROOT / "deploy" / "specs" / "tiny-judge.yaml"


@pytest.mark.long
def test_a_judge_scores_every_sample_and_is_replaced_as_the_engine_is_until_no_restart_is_left(tmp_path: Path) -> None:
    """SIGKILL of the judge's engine: groups wait for the new one, and nothing is dropped.

    Then SIGKILL of the rollout worker's engine, which is replaced once; its second loss ends the run. That a worker
    dies instead of its engine is in test_environment_run.py, for other roles.
    """
    small = ("roles.judge.model.path=.cache/models/tiny-llama", "sampling.max_tokens=64")
    endless = ("schedule.steps=1000", "failures.health_interval_s=2", "failures.engine_restarts=1")
    endless += ("roles.rollout.max_num_seqs=2",)  # generating a step takes seconds
    with running(Run(tmp_path, TINY, *small, *endless, "schedule.prompts_per_step=8", name="killed")) as run:
        run.wait_for_step(1)
        engine_of(run, "JudgeWorker").kill()
        run.wait_until(lambda: run.output.count("judge-0 is lost") == 1, "the loss to be noticed")
        engine = engine_of(run, "RolloutWorker")
        run.wait_for_step(run.metrics[-1]["step"] + 2)
        engine.kill()  # it has begun to generate the next step
        run.wait_until(lambda: run.metrics[-1]["ledger/retries"] > 0, "a retry on a new engine")
        assert_judged(run)
        engine_of(run, "RolloutWorker").kill()
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert "no rollout engine is left (1 of 1 restarts used: failures.engine_restarts)" in run.error_lines[0]
        assert "rollout-0" in run.error_lines[0]
        assert run.leftover_processes() == []
    assert run.weight_files == []
    assert_judged(run)
    assert run.metrics[0]["workers/judge"] == 1


def assert_judged(run: Run) -> None:
    """Check that every sample of every step so far is trained on, once, with a score of the judge."""
    lines = run.metrics
    for line in lines:
        assert ledger_balances(line) and line["ledger/dropped"] == 0
        assert line["ledger/trained"] == 32 * line["step"]
    for line in lines[:-2]:  # the trajectories of the last two may not be written
        table = trajectories(run.out, line["step"]).to_pylist()
        assert len(table) == 32 and {row["status"] for row in table} == {"ok"}
        assert all(round(10 * row["reward"], 6) in range(11) for row in table), "a score from 0 to 10"


def engine_of(run: Run, worker: str) -> psutil.Process:
    """The engine process of the only worker of this class."""
    (process,) = run.processes(worker)
    (engine,) = descendants(process.pid, "EngineCore")
    return engine

"""Runs with the role `judge`: real Ray and vLLM, scores in the form of the spec, and engines that are killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import descendants
from tests.real.commands import Run, ledger_balances, run_troupe, running, trajectories
from tests.workers.agents.judges.judge_endpoint import endpoint

TINY = ROOT / "deploy" / "specs" / "tiny-judge.yaml"


@pytest.mark.long
def test_a_judge_scores_every_sample_and_is_replaced_as_the_engine_is_until_no_restart_is_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    """SIGKILL of the judge's engine: groups wait for the new one, and nothing is dropped.

    Then SIGKILL of the rollout worker's engine, which is replaced once; its second loss ends the run. That a worker
    dies instead of its engine is in test_environment_run.py, for other roles.
    """
    endless = (judge_of(tiny_model), "sampling.max_tokens=64", "roles.judge.max_tokens=32")
    endless += ("schedule.steps=1000", "failures.health_interval_s=2", "failures.engine_restarts=1")
    endless += ("roles.rollout.max_num_seqs=2",)  # generating a step takes seconds
    with running(Run(tmp_path, TINY, *endless, "schedule.prompts_per_step=8", name="killed")) as run:
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


def judge_of(model: Path) -> str:
    """The override with which a model judges."""
    return f"roles.judge.model.path={model}"


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


LINES = r"\n".join(f"Score {number}: (10|[0-9])" for number in range(1, 5))
COMPARING = (
    "roles.judge.max_tokens=96",
    rf"roles.judge.structured.regex='{LINES}\nBetter: (A|B|tie)'",
    "roles.reward.functions.0.args.compare=group",
    "roles.reward.functions.0.args.answers=2",
    "data.eval.held={kind: reasoning_gym, recipes: [{name: gcd}], size: 6, seed: 3, rewards: [{name: judge, timeout_s: "
    "120, args: {rubric: Which is friendlier?, compare: baseline}}]}",
    "evaluation={every_steps: 2}",
)


@pytest.mark.long
def test_a_group_is_compared_and_a_model_wins_half_of_the_comparisons_with_itself(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A run scores each group in one question and reports a win rate against the data's answers.

    Then the model of its start is compared with the answers that the run stored of it: whatever a random judge says of
    two equal responses, one wins what the other loses.
    """
    models = (judge_of(tiny_model), *COMPARING)
    with running(Run(tmp_path, TINY, *models, name="compared")) as run:
        assert run.wait() == 0, run.output
    for line in run.metrics[1:]:  # the first one is the evaluation before training
        assert ledger_balances(line) and line["ledger/trained"] == 16 * line["step"]
    table = trajectories(run.out, 1).to_pylist()
    assert {row["status"] for row in table} == {"ok"} and len({row["reward"] for row in table}) > 1
    last = run.metrics[-1]
    assert 0.0 <= last["eval/held/win_rate_low"] <= last["eval/held/win_rate"] <= last["eval/held/win_rate_high"] <= 1.0
    assert 0.0 <= last["eval/held/position_consistency"] <= 1.0
    stored = run.out / "evaluation" / "step-000000.parquet"
    sets = [*models, f"data.eval.held.rewards.0.args.baseline={stored}", f"name={run.name}-itself"]
    results = tmp_path / "itself.json"
    run_troupe(
        tmp_path,
        *("eval", str(TINY), "--model", str(tiny_model), "--output", str(results)),
        *(part for one in sets for part in ("--set", one)),
    )
    (found,) = json.loads(results.read_text())["evaluations"]
    assert found["sets"]["held"]["failed_samples"] == 0
    assert found["sets"]["held"]["estimates"]["win_rate"]["value"] == 0.5


@pytest.mark.long
def test_two_judges_compare_the_samples_of_an_asynchronous_run_with_adapters_that_is_resumed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The role scores each group in one question, and an endpoint prefers whatever stands first.

    The bias gives every sample half, before and after the resume; no question is asked twice, for the answers of both
    runs are in the file.
    """
    form = r"\n".join(f"Score {number}: (10|[0-9])" for number in range(1, 5))
    of_role = "{name: judge, label: group, timeout_s: 120, args: {rubric: Which is friendlier?, compare: group}}"
    overrides = (
        *(judge_of(tiny_model), "roles.judge.max_tokens=64", f"roles.judge.structured.regex='{form}'"),
        *("roles.policy.lora={rank: 4, alpha: 32}", "schedule.max_staleness=1", "checkpoint.every_steps=1"),
    )
    with endpoint(lambda number, body: "Better: A") as served:
        args = f"{{rubric: Kinder?, compare: pairs, opponents: 2, max_requests: 10000, cache: {tmp_path / 'answers'}, "
        args += f"endpoint: {{url: '{served.url}', model: m}}}}"
        of_endpoint = f"{{name: judge, label: pairs, timeout_s: 120, args: {args}}}"
        overrides = (*overrides, f"roles.reward.functions=[{of_role}, {of_endpoint}]")
        for steps in (2, 4):
            resumed = (f"schedule.steps={steps}",)
            with running(Run(tmp_path, TINY, *overrides, *resumed, name="both", resume=steps > 2)) as run:
                assert run.wait() == 0, run.output
        asked = [json.dumps(body["messages"]) for body in served.bodies]
    assert run.steps() == [1, 2, 3, 4]
    assert len(asked) == len(set(asked))
    assert {line["staleness/max"] for line in run.metrics} == {0, 1}
    for line in run.metrics:
        assert ledger_balances(line) and line["ledger/dropped"] == 0 and line["ledger/trained"] == 16 * line["step"]
        assert (line["reward/pairs/mean"], line["reward/pairs/std"]) == (0.5, 0.0)
        assert line["policy/grad_norm"] > 0.0
        rows = trajectories(run.out, line["step"]).to_pylist()
        assert {row["status"] for row in rows} == {"ok"} and len({row["reward"] for row in rows}) > 1

"""`troupe run`: what it says where a run ends, fails or is stopped. The runs themselves: `tests/real/`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import troupe
from tests.conftest import ROOT
from troupe.orchestrator.cli import app
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.errors import StopRequested, TroupeError, WorkerError
from troupe.orchestrator.insight.report import report as report_module
from troupe.orchestrator.insight.verdicts.apply import RunningVerdicts
from troupe.orchestrator.runs import training as training_module
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog, recorded_failure

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
RECORDED = ROOT / "tests" / "orchestrator" / "insight" / "verdicts" / "recorded"
Ends = Callable[[], RunOutcome]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Callable[[Ends], None]:
    """Replaces training by the records of a run that never solved a task, after which a function ends it."""
    monkeypatch.setenv("TROUPE_MODELS", str(tiny_model.parent))

    def use(end: Ends) -> None:
        def train(request: RunRequest, console: Console) -> RunOutcome:
            request.out.mkdir(parents=True)
            request.spec.write(request.out / RESOLVED_SPEC)
            shutil.copy(RECORDED / "sick-never-solved.jsonl", request.out / "metrics.jsonl")
            console.step(1, {"reward/mean": 0.0})
            events = EventLog()
            events.open(request.out, 0)
            with recorded_failure(events):
                outcome = end()
            events.record("run_ended", how=outcome.how)
            return outcome

        monkeypatch.setattr(training_module, "train", train)

    return use


def stopped() -> RunOutcome:
    return RunOutcome(1, True, {}, {}, {"dispatched": 1, "trained": 1, "dropped": 0}, {}, "")


def engine_lost() -> RunOutcome:
    raise WorkerError("rollout-0", "generate", "no restarts are left")


def interrupted() -> RunOutcome:
    raise KeyboardInterrupt


def asked() -> RunOutcome:
    return replace(stopped(), interrupted=True)


def asked_at_its_start() -> RunOutcome:
    raise StopRequested("the run was asked to stop")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setattr(sys, "argv", ["troupe", "run", *arguments])
    return CliRunner().invoke(app, ["run", *arguments])


@pytest.mark.parametrize("end", [stopped, engine_lost])
def test_a_run_that_does_not_finish_has_verdicts_a_report_and_the_command_that_resumes_it(
    end: Ends, ends: Callable[[Ends], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends(end)
    out = tmp_path / "a run"
    result = run(monkeypatch, str(GRPO), "--out", str(out), "--set", "seed=3")
    assert result.exit_code == (1 if end is engine_lost else 130)
    assert isinstance(result.exception, WorkerError) == (end is engine_lost)
    assert (out / "report.html").stat().st_size > 10_000
    assert "healthy" not in result.stdout and "reward is 0" in result.stdout
    lines = result.stdout.splitlines()
    first = lines.index(f"results so far are in {out}; next:")
    assert lines[first + 1].split("  ")[1] == f"troupe run {GRPO} --out '{out}' --set seed=3 --resume"
    assert lines[first + 2].startswith(f"  troupe samples {out} ")
    assert lines[first + 3] == f"report: open {out / 'report.html'} in a browser"


@pytest.mark.parametrize("end", [asked, asked_at_its_start, interrupted])
def test_a_run_of_a_thousand_steps_that_was_asked_to_stop_leaves_its_records_to_the_report(
    end: Ends, ends: Callable[[Ends], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever its records are: none is read, and no process is started, so that it ends in seconds."""
    out, (first, *_) = tmp_path / "run", (RECORDED / "sick-never-solved.jsonl").read_text().splitlines()

    def thousand_steps() -> RunOutcome:
        lines = [json.dumps(json.loads(first) | {"step": step}) for step in range(1, 1001)]
        (out / "metrics.jsonl").write_text("\n".join(lines))
        for owner, name in ((RunningVerdicts, "final"), (report_module, "report_text")):
            monkeypatch.setattr(owner, name, lambda *_: pytest.fail("its records are read"))
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
        return end()

    ends(thousand_steps)
    result = run(monkeypatch, str(GRPO), "--out", str(out))
    assert result.exit_code == 130 or isinstance(result.exception, StopRequested), result.output
    assert not (out / "report.html").exists() and "next:" in result.stdout
    assert result.stdout.splitlines()[-1].split("  ")[1] == f"troupe report {out}"
    shutil.rmtree(out)
    if end is asked:
        assert troupe.run(GRPO, out=out).stopped
    else:
        with pytest.raises((StopRequested, KeyboardInterrupt)):
            troupe.run(GRPO, out=out)
    assert not (out / "report.html").exists()


def test_the_report_of_a_chain_that_fails_has_the_stages_that_have_begun(
    ends: Callable[[Ends], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends(engine_lost)
    result = run(monkeypatch, str(CHAIN), "--out", str(tmp_path / "chain"))
    assert f"report: open {tmp_path / 'chain' / 'report.html'} in a browser" in result.stdout
    assert [path.name for path in (tmp_path / "chain").iterdir() if path.is_dir()] == ["sft"]
    assert "troupe samples" not in result.stdout, "offline training samples nothing"
    assert "the report was not written" not in caplog.text


def test_a_chain_that_is_asked_to_stop_while_a_stage_closes_begins_no_other(
    ends: Callable[[Ends], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends(lambda: replace(asked(), stopped=False))
    result = run(monkeypatch, str(CHAIN), "--out", str(tmp_path / "chain"))
    assert [path.name for path in (tmp_path / "chain").iterdir() if path.is_dir()] == ["sft"]
    assert result.exit_code == 130 and "--resume  " in result.stdout


def test_a_run_that_does_not_begin_leaves_the_records_of_another_as_they_are(
    ends: Callable[[Ends], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder may be that of a run that trains at this moment."""

    def refuse(request: RunRequest, console: Console) -> RunOutcome:
        raise TroupeError("another run uses the folder")

    shutil.copy(RECORDED / "sick-never-solved.jsonl", tmp_path / "metrics.jsonl")
    ends(stopped)
    monkeypatch.setattr(training_module, "train", refuse)
    result = run(monkeypatch, str(GRPO), "--out", str(tmp_path))
    assert str(result.exception) == "another run uses the folder"
    assert "next:" not in result.stdout and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("end", [stopped, engine_lost])
def test_a_run_of_the_library_has_a_report_however_it_ends(
    end: Ends, ends: Callable[[Ends], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(end)
    out = tmp_path / "run"
    if end is stopped:
        assert troupe.run(GRPO, out=out).stopped
    else:
        with pytest.raises(WorkerError, match="no restarts are left"):
            troupe.run(GRPO, out=out)
    assert (out / "report.html").stat().st_size > 10_000
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {out / 'report.html'}"

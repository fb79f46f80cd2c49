"""The loop of a sweep, over children that write the metrics of a run at once and train nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from tests.conftest import ROOT
from troupe.orchestrator.cli import app
from troupe.orchestrator.commands import runs
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.sweep import sweep as module
from troupe.orchestrator.runs.checkpoints import SavedRun
from troupe.orchestrator.runs.children import ChildCommand
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.load import plan_runs
from troupe.orchestrator.spec.yaml_reader import read_file

SFT = ROOT / "deploy" / "specs" / "tiny-sft.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
RATE = "roles.policy.learning_rate"


class Child(ChildCommand):
    """A run that trains a step whenever it is looked at; its loss falls with the learning rate."""

    started: ClassVar[list[str]] = []
    active: ClassVar[int] = 0
    most: ClassVar[int] = 0
    interrupt_at: ClassVar[int] = 0
    fails: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        assert arguments[0] == "run" and "--resume" in arguments
        self.folder = Path(arguments[3])
        *before, last = plan_runs(read_file(arguments[1]), self.folder)
        self.spec, self.out = last.spec, last.out
        for run in (*before, last):
            run.out.mkdir(parents=True, exist_ok=True)
        for run in before:
            (run.out / "metrics.jsonl").write_text('{"step": 0, "policy/nll": 100.0}\n' * run.spec.schedule.steps)
        self.code: int | None = None
        self.stopping = False
        Child.started.append(self.folder.name)
        Child.active += 1
        Child.most = max(Child.most, Child.active)
        self._log = log
        log.write_text("starting\nerror: no room\n\n")

    def ended(self) -> int | None:
        if self.code is not None:
            return self.code
        done = steps_of(self.out)
        if self.folder.name in Child.fails:
            self._end(1)
        elif self.stopping:
            self._end(130)
        elif done == self.spec.schedule.steps:
            self._end(0)
        else:
            if Child.interrupt_at and len(Child.started) == Child.interrupt_at:
                Child.interrupt_at = 0
                raise KeyboardInterrupt
            self._train(done + 1)
        return self.code

    def _end(self, code: int) -> None:
        self.code = code
        Child.active -= 1

    def _train(self, step: int) -> None:
        loss = 1 - 10 * self.spec.roles.policy.learning_rate + 0.001 * self.spec.seed
        line = {"step": step, "policy/nll": loss, "kl_ref": loss / 2, "reward/mean": -loss}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def stop(self) -> None:
        self.stopping = True

    def kill(self) -> None:
        assert self.code is not None, "a child that saves is not killed"


def steps_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> type[Child]:
    def saved(spec: RunSpec, out: Path) -> SavedRun:
        return SavedRun(steps_of(out), steps_of(out) >= spec.schedule.steps)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(runs, "read_data", lambda runs: [])  # the real stack's trials read it
    monkeypatch.setattr(module, "ChildCommand", Child)
    monkeypatch.setattr(module, "saved_run", saved)
    monkeypatch.setattr(module, "SIGNALS_S", 0.0)
    Child.started, Child.active, Child.most, Child.interrupt_at, Child.fails = [], 0, 0, 0, frozenset()
    return Child


def sweep(
    folder: Path, *options: str, rates: str = "0.01,0.02,0.03", steps: int = 3, spec: Path = SFT, stage: str = ""
) -> Result:
    values = f"{stage}{RATE}={rates}", f"{stage}schedule.steps={steps}"
    fields = (*(part for value in values for part in ("--set", value)), "--metric", "policy/nll")
    return CliRunner().invoke(app, ["sweep", str(spec), *fields, "--out", str(folder / "sweep"), *options])


def refused(done: Result) -> str:
    assert isinstance(done.exception, UsageError), done.output
    return str(done.exception)


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep" / "sweep.json").read_text())


def test_every_setting_runs_with_every_seed_so_many_at_once(children: type[Child], tmp_path: Path) -> None:
    done = sweep(tmp_path, "--seeds", "2", "--at-once", "2")
    assert done.exit_code == 0, done.output
    assert sorted(children.started) == [f"trial-00{number}" for number in range(1, 7)] and children.most == 2
    found = record(tmp_path)
    assert found["best"] == "learning_rate 0.03" and found["inseparable"] == []
    assert [one["mean"] for one in found["settings"]] == pytest.approx([0.9075, 0.8075, 0.7075])
    assert "best: learning_rate 0.03: policy/nll 0.7075 (0.7011 to 0.7139, 95% interval over 2 seeds)" in done.stdout
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert '"label":"learning_rate 0.02, seed 8"' in page and '"sentence":"best: learning_rate 0.03' in page
    assert len(found["frontier"]) == 1, "the least KL has the highest reward"
    assert "already contains a sweep: use --resume" in refused(sweep(tmp_path))


def test_an_interrupted_sweep_resumes_what_is_left(children: type[Child], tmp_path: Path) -> None:
    children.interrupt_at = 2
    stopped = sweep(tmp_path, "--json")
    assert stopped.exit_code == 130 and "with --resume" in stopped.stderr
    trials = [one["trials"][0] for one in json.loads(stopped.stdout)["settings"]]
    assert [one["status"] for one in trials] == ["complete", "stopped", "waiting"] and children.active == 0
    kept = (tmp_path / "sweep" / "trial-001" / "metrics.jsonl").stat()
    children.started.clear()
    assert sweep(tmp_path, "--resume").exit_code == 0
    assert children.started == ["trial-002", "trial-003"], "a complete trial is not run again"
    assert (tmp_path / "sweep" / "trial-001" / "metrics.jsonl").stat() == kept
    assert all(one["complete"] for one in record(tmp_path)["settings"])


def test_a_resumed_sweep_is_the_one_that_began(children: type[Child], tmp_path: Path) -> None:
    assert sweep(tmp_path).exit_code == 0
    assert "schedule.steps is 3, now 4" in refused(sweep(tmp_path, "--resume", steps=4))
    assert "has 3 trials, not 2" in refused(sweep(tmp_path, "--resume", rates="0.01,0.02"))


def test_bad_settings_end_early_and_stay_so_when_resumed(children: type[Child], tmp_path: Path) -> None:
    rates = "0.05,0.04,0.03,0.02,0.01"
    done = sweep(tmp_path, "--halve", "2", "--seeds", "2", rates=rates, steps=20)
    assert done.exit_code == 0, done.output
    trials = [one["trials"] for one in record(tmp_path)["settings"]]
    assert [one[0]["status"] for one in trials] == ["complete", *["stopped early"] * 4]
    assert trials[0][0]["step"] == 20 and all(one[0]["step"] < 5 for one in trials[1:])
    assert [one[1]["status"] for one in trials] == ["complete", *["waiting"] * 4], "the first seed decides"
    assert "at step 2 is below the best third" in trials[1][0]["reason"]
    children.started.clear()
    again = sweep(tmp_path, "--resume", "--halve", "2", "--seeds", "2", rates=rates, steps=20)
    assert again.exit_code == 0 and children.started == []
    assert record(tmp_path)["best"] == "learning_rate 0.05"


def test_a_trial_that_fails_costs_no_other(children: type[Child], tmp_path: Path) -> None:
    children.fails = frozenset({"trial-002"})
    done = sweep(tmp_path)
    assert done.exit_code == 1
    assert "trial-002: failed: ended with exit code 1: error: no room" in done.stdout
    assert [one["complete"] for one in record(tmp_path)["settings"]] == [True, False, True]
    children.fails, children.started = frozenset(), []
    assert sweep(tmp_path, "--resume").exit_code == 0 and children.started == ["trial-002"]


def test_a_trial_of_a_chain_is_the_whole_chain_and_its_value_that_of_the_last_stage(
    children: type[Child], tmp_path: Path
) -> None:
    def chain(*options: str, **given: Any) -> Result:
        return sweep(tmp_path, "--seeds", "2", *options, spec=CHAIN, stage="stages.ppo.", **given)

    children.interrupt_at = 2
    assert chain().exit_code == 130
    children.started.clear()
    done = chain("--resume")
    assert done.exit_code == 0, done.output
    assert children.started == [f"trial-00{number}" for number in range(2, 7)]
    found = record(tmp_path)
    assert [one["mean"] for one in found["settings"]] == pytest.approx([0.9075, 0.8075, 0.7075])
    assert found["best"] == "learning_rate 0.03" and len(found["frontier"]) == 1
    assert '"label":"learning_rate 0.02, seed 8"' in (tmp_path / "sweep" / "report.html").read_text()
    (tmp_path / "sweep" / "trial-003" / "sft" / "metrics.jsonl").unlink()
    children.started.clear()
    assert chain("--resume").exit_code == 0
    assert children.started == ["trial-003"], "a trial is complete if each of its stages is"
    assert "trial-001.yaml: stages.sft.schedule.steps is 8, now 5" in refused(
        chain("--resume", "--set", "stages.sft.schedule.steps=5")
    )
    rounds = refused(chain("--resume", "--set", "rounds=2"))
    assert "trial-001.yaml: the number of runs is 3, now 6" in rounds

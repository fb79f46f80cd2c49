"""Verdicts that a run says while it trains, and what it advises on the machine that it has."""

from __future__ import annotations

import io
import json
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from troupe.orchestrator.insight.verdicts.apply import HEALTHY, RunningVerdicts, alarm_lines, faster, fits
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.updates import fewer_updates
from troupe.orchestrator.insight.verdicts.verdict import Remedy, field
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EVENTS
from troupe.orchestrator.telemetry.run_folder import METRICS


@pytest.fixture
def spec() -> dict[str, Any]:
    return plan_runs(read_document("examples:tiny-grpo"))[0].spec.model_dump(mode="json")


CUT = {"reward/mean": 0.5, "truncated": 0.9, "response_tokens/mean": 30.0}


def record(folder: Path, steps: int, metrics: dict[str, float]) -> None:
    """Metrics of steps that are all alike."""
    lines = [{"step": step, "time": float(step), "updates": 1.0} | metrics for step in range(1, steps + 1)]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_alarm_is_said_once_while_the_run_trains(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / RESOLVED_SPEC).write_text(yaml.safe_dump(spec))
    said: list[str] = []
    verdicts = RunningVerdicts(tmp_path, said.append)
    for step in range(1, 21):
        record(tmp_path, step, CUT)
        verdicts.after_step(step)
        verdicts.final()
    assert said[0].startswith("warning: Responses are truncated (since step 1): ")
    assert all(line.startswith("  try: ") for line in said[1:]) and said[1:]


def test_the_alarms_are_the_last_lines_of_a_run(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / RESOLVED_SPEC).write_text(yaml.safe_dump(spec))
    stream = io.StringIO()
    console = Console(stream)
    console.start("name", 8, RunningVerdicts(tmp_path, console.aside))
    for step in range(1, 9):
        record(tmp_path, step, CUT)
        console.step(step, CUT)
    console.finish({})
    after = stream.getvalue().partition("learning")[2]
    assert "warning: Responses are truncated" in after and "\n  try: " in after


def test_a_run_that_has_ended_says_nothing_more(
    tmp_path: Path, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts still being found where a run is stopped would follow its last lines."""
    (tmp_path / RESOLVED_SPEC).write_text(yaml.safe_dump(spec))
    record(tmp_path, 8, CUT)
    ended, stream = threading.Event(), io.StringIO()
    console = Console(stream)
    verdicts = RunningVerdicts(tmp_path, console.aside)
    monkeypatch.setattr(verdicts, "_found", lambda found=verdicts._found: ended.wait(60) and found())
    console.start("name", 9, verdicts)
    console.step(8, CUT)
    console.close()
    before = stream.getvalue()
    ended.set()
    assert verdicts.final() and stream.getvalue() == before
    console.message("next: resume")
    assert stream.getvalue() == before + "next: resume\n"


def test_what_cannot_be_read_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    verdicts = RunningVerdicts(tmp_path / "missing", said.append)
    verdicts.after_step(1)
    assert verdicts.final() == [] and not said
    assert alarm_lines([]) == [HEALTHY]


def test_a_long_run_is_looked_at_every_twentieth_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = RunningVerdicts(tmp_path / "missing", lambda line: None)
    looked: list[None] = []
    monkeypatch.setattr(verdicts, "_look", lambda: looked.append(None))
    for step in range(1, 1001):
        verdicts.after_step(step)
        verdicts.final()
    assert 60 < len(looked) < 130


def test_a_remedy_needs_room_on_the_cluster(spec: dict[str, Any]) -> None:
    engines = Remedy("Add engines.", field("roles.rollout.workers", 2))
    assert fits(engines, spec) and fits(engines, spec, {"CPU": 64.0, "GPU": 0.0})
    assert not fits(engines, spec, {"CPU": 1.5, "GPU": 0.0})
    slower = Remedy("Slower.", field("roles.policy.learning_rate", 0.001))
    assert fits(slower, spec, {"CPU": 1.0, "GPU": 0.0}), "it asks for no more than the run has"


def test_a_remedy_that_the_spec_has_already_is_left_out(spec: dict[str, Any]) -> None:
    for path, has in (("roles.rollout.workers", 1), ("schedule.epochs", 1), ("algorithm.name", "grpo")):
        assert not fits(Remedy("As it is.", field(path, has)), spec), path
        assert not fits(Remedy("As it is.", field(path, has)), spec, {"CPU": 64.0, "GPU": 0.0}), path


def test_fewer_updates_are_fewer_of_what_a_batch_has_several_of() -> None:
    for schedule, wanted in (({"epochs": 4, "minibatches": 2}, "epochs"), ({"minibatches": 2}, "minibatches")):
        assert fewer_updates(History({}, {"schedule": schedule})).spec == field(f"schedule.{wanted}", 1)


def test_advice_knows_the_spec_and_the_machine(tmp_path: Path, spec: dict[str, Any]) -> None:
    waits = {"seconds/step": 10.0, "seconds/generate": 6.0, "seconds/update": 3.0, "utilisation/generate": 0.6}
    record(tmp_path, 12, waits)

    def advice(cpus: float, staleness: int) -> list[str]:
        started = {"event": "run_started", "capacity": {"CPU": cpus, "GPU": 0.0}}
        (tmp_path / EVENTS).write_text(json.dumps(started) + "\n")
        (tmp_path / RESOLVED_SPEC).write_text(
            yaml.safe_dump(spec | {"schedule": spec["schedule"] | {"max_staleness": staleness}})
        )
        lines = faster(RunningVerdicts(tmp_path, lambda line: None).final())
        return [line.rpartition(" ")[2].partition("=")[0] for line in lines]

    assert advice(64.0, 0) == ["schedule.max_staleness", "roles.rollout.workers"]
    assert advice(1.5, 0) == [], "engines and trainer compute on the same cores"
    assert advice(64.0, 1) == ["roles.rollout.workers"], "the run has it already"
    assert advice(2.0, 0) == ["schedule.max_staleness"], "there is a core for each, and none for another engine"
    spec = plan_runs(read_document("examples:tiny-ppo"))[0].spec.model_dump(mode="json")
    assert advice(2.0, 0) == [], "a critic takes the core that would be left"


def test_a_remedy_is_a_line_for_a_shell() -> None:
    change = Remedy("Change it.", "sampling:\n  stop: [a b, c]\nschedule:\n  steps: 3")
    words = shlex.split(change.line.removeprefix("Change it. "))
    assert words == ["--set", "sampling.stop=[a b, c]", "--set", "schedule.steps=3"]

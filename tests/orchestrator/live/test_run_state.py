"""One state of a run, which every command, report and function says: on folders with the records of each."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from typer.testing import CliRunner

import troupe
from tests.conftest import ROOT
from tests.orchestrator.insight.verdicts.cases import RECORDED
from tests.orchestrator.insight.why.observed_run import Cluster
from troupe.orchestrator.cli import app
from troupe.orchestrator.commands import train
from troupe.orchestrator.errors import StopRequested, WorkerError
from troupe.orchestrator.insight.report.report import page_data
from troupe.orchestrator.insight.verdicts.apply import HEALTHY
from troupe.orchestrator.insight.watch import LiveData
from troupe.orchestrator.insight.why.client import why
from troupe.orchestrator.insight.why.facts import (
    ENDED,
    FOLDER,
    SNAPSHOT,
    DriverFacts,
    DriverSnapshot,
    Facts,
    RunFacts,
)
from troupe.orchestrator.insight.why.observer import RunObserver
from troupe.orchestrator.live.lock import LOCK_FILE, LockHolder, locked
from troupe.orchestrator.live.run_state import Name, RunState, run_state, state_of
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog, recorded_failure
from troupe.orchestrator.telemetry.run_folder import RunFolder

STEPS = 4
LOST = "WorkerError: rollout-0.generate: no restarts are left"
HOLD = """
import sys, time
from pathlib import Path
from troupe.orchestrator.live.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a run folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait()


def start(folder: Path, steps: int = STEPS) -> EventLog:
    """The records of a run that has made these steps, with its events still open."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDED / "healthy-ppo.yaml", folder / "spec.yaml")
    lines = (RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[:steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    events = EventLog()
    events.open(folder, 0)
    events.record("run_started", resume_at=0)
    return events


def ended(folder: Path, how: str) -> None:
    with locked(folder):
        start(folder).record("run_ended", how=how)


def raised(folder: Path, error: Exception) -> None:
    with locked(folder), pytest.raises(type(error)), recorded_failure(start(folder)):
        raise error


@contextmanager
def recorded(folder: Path, name: Name) -> Iterator[None]:
    """The folder of a run in this state."""
    folder.mkdir()
    match name:
        case "running":
            with locked(folder):
                start(folder)
                yield
            return
        case "died":
            with held(folder) as process:
                start(folder)
                process.kill()  # it stays a zombie until the end of the block
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                yield
            return
        case "not started":
            shutil.copy(RECORDED / "healthy-ppo.yaml", folder / "spec.yaml")
        case "failed":
            raised(folder, WorkerError("rollout-0", "generate", "no restarts are left"))
        case "stopped":
            raised(folder, StopRequested("stop"))
        case "finished":
            ended(folder, "finished")
        case "unknown":
            start(folder)
            (folder / "events.jsonl").unlink()
    yield


def printed(*command: str) -> str:
    result = CliRunner().invoke(app, [*command])
    assert result.exit_code == 0, result.output
    return result.stdout


def by_report(folder: Path) -> str:
    (found,) = json.loads(printed("report", str(folder), "--json")).values()
    return found["state"]["name"]


def by_verdicts(folder: Path) -> str:
    """The verdicts on how it has ended; those on its metrics are the same in all of the folders."""
    names = {verdict.name for verdict in troupe.Outcome(folder).verdicts}
    known = {"failed-run": "failed", "dead-run": "died"}
    return next((state for name, state in known.items() if name in names), "")


READERS: dict[str, Callable[[Path], str]] = {
    "run_state": lambda folder: run_state(RunFolder(folder)).name,
    "report --json": by_report,
    "page": lambda folder: page_data([RunFolder(folder)])["runs"][0]["state"],
    "Outcome": lambda folder: troupe.Outcome(folder).state.name,
}


@pytest.mark.parametrize("name", get_args(Name))
def test_every_reader_says_the_same(name: Name, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with recorded(folder, name):
        assert {reader: read(folder) for reader, read in READERS.items()} == dict.fromkeys(READERS, name)
        assert by_verdicts(folder) == (name if name in ("failed", "died") else "")
        assert troupe.Outcome(folder).stopped is (name == "stopped")
        text = printed("report", str(folder))
        state = run_state(RunFolder(folder))
        assert (f"{folder}: {state}\n" in text) is (name != "finished")
        assert name == "finished" or HEALTHY not in text
        detail = {"failed": LOST, "died": f"on {socket.gethostname()} has left no record of its end: it was killed"}
        assert detail.get(name, "") in state.detail and bool(state.detail) is (name in detail)
        steps = 0 if name == "not started" else STEPS
        assert (state.steps, state.total) == (steps, RunFolder(folder).spec["schedule"]["steps"])


@pytest.mark.parametrize("name", ["finished", "stopped", "failed"])
async def test_why_says_how_a_run_has_ended(name: Name, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with recorded(folder, name):
        observer = RunObserver(folder, "demo", Console(io.StringIO()), cast("Any", Cluster(tmp_path / "logs", {})))
        await asyncio.to_thread(observer.close)
        last = ENDED.read(folder / FOLDER)
        assert last is not None and last.diagnosis.summary == f"the run has {run_state(RunFolder(folder))}"


def test_a_run_that_resumes_is_running_and_then_ends_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with recorded(folder, "died"):
        pass
    with locked(folder):
        assert run_state(RunFolder(folder)).name == "running", "it is starting"
        start(folder).record("run_ended", how="finished")
        assert run_state(RunFolder(folder)).name == "finished", "its workers are closed"
    assert run_state(RunFolder(folder)).name == "finished"


@pytest.mark.parametrize("name", ["died", "failed"])
def test_a_run_whose_supervisor_starts_it_again_is_running(name: Name, tmp_path: Path) -> None:
    folder, waits = tmp_path / "run", "its supervisor starts it again"
    with recorded(folder, name):
        pass
    (folder / FOLDER).mkdir()
    driver = DriverFacts(2**22 + 1, socket.gethostname())
    snapshot = DriverSnapshot(time.time(), driver.host, driver.pid, 1, Facts(RunFacts("demo"), driver), str(tmp_path))
    SNAPSHOT.write(folder / FOLDER, snapshot)
    with locked(folder, waits):
        assert run_state(RunFolder(folder)) == RunState("running", waits, STEPS, 8)
    assert run_state(RunFolder(folder)) == RunState("running", waits, STEPS, 8), "until the next start has the lock"
    assert by_verdicts(folder) == ""
    said = why(folder, 1.0).diagnosis
    assert said.summary.startswith(f"{waits} (process {os.getpid()}); before that, the driver")
    assert said.cause == "driver_dead"
    with held(folder):
        assert run_state(RunFolder(folder)) == RunState("running", "", STEPS, 8)
        assert why(folder, 1.0).diagnosis.summary.startswith("it is starting again (process ")
    assert run_state(RunFolder(folder)).name == "died"


def test_a_supervisor_waits_with_the_lock_of_the_run_that_was_begun_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, later = tmp_path / "begun", tmp_path / "later"
    with recorded(begun, "died"):
        pass
    runs: Any = [SimpleNamespace(out=begun), SimpleNamespace(out=later)]
    seen: list[RunState] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append(run_state(RunFolder(begun))))
    train._pause(2.0, runs)
    assert seen == [RunState("running", "its supervisor starts it again", STEPS, 8)] and not later.exists()
    with held(begun):  # another run was faster: the next start says so
        train._pause(2.0, runs)
    train._pause(2.0, runs[1:])
    assert len(seen) == 3


def test_a_start_that_is_killed_after_an_end_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with recorded(folder, "stopped"):
        pass
    events = (folder / "events.jsonl").read_text().splitlines()
    past = [json.loads(line) | {"time": time.time() - 60} for line in events]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in past))
    with held(folder):
        assert run_state(RunFolder(folder)).name == "running"
    assert run_state(RunFolder(folder)).name == "died"


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"namespace": 1}], ids=["host", "container"])
def test_a_process_that_is_not_seen_here_is_known_by_the_age_of_its_lock(other: dict[str, Any], tmp_path: Path) -> None:
    """A container on the host's network has the host's name, and other process ids."""
    folder = tmp_path / "run"
    with recorded(folder, "died"):
        file = folder / LOCK_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | other | {"pid": 2**22 + 1}))
        assert run_state(RunFolder(folder)).name == "running"
        os.utime(file, (time.time(), time.time() - 600))
        state = run_state(RunFolder(folder))
        assert state.name == "died" and "has not renewed its lock for 600 s" in state.detail


def test_a_page_that_is_open_changes_when_the_process_of_its_run_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with held(folder):
        start(folder)
        data = LiveData([folder])
        before = data.mark()
        assert data.mark() == before
    assert data.mark() != before


def test_a_reused_process_id_is_not_the_run(tmp_path: Path) -> None:
    with locked(tmp_path):
        own = LockHolder.of(tmp_path)
    assert own is not None
    holder = replace(own, started=1)
    assert state_of([{"event": "run_started"}], holder, 0, 3).name == "died"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (RunState("stopped", "", 3, 10), "stopped after 3 of 10 steps"),
        (RunState("finished", "no gain", 3, 10), "finished after 3 of 10 steps: no gain"),
        (RunState("failed", "E: why", 0, 10), "failed before its first step: E: why"),
        (RunState("not started", "", 0, 10), "not started"),
    ],
)
def test_a_state_is_a_line(state: RunState, text: str) -> None:
    assert str(state) == text


def test_a_process_that_has_released_the_lock_is_not_the_run(tmp_path: Path) -> None:
    """A notebook's continues; a full disk has no room for the end."""
    with locked(tmp_path):
        start(tmp_path)
    assert run_state(RunFolder(tmp_path)) == RunState("died", "it could not record its end", STEPS, 8)

"""`troupe why` reaches a run that waits, hangs or is dead; the run is a process without Ray."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.faults.stalls import frozen, may_mount, own_disk
from tests.fork_server import Forked
from tests.forked_commands import run_command
from tests.orchestrator.insight.why import observed_run
from tests.orchestrator.insight.why.observed_run import Cluster
from tests.orchestrator.test_mailbox import wait_for
from tests.processes import suspend
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.insight.why import observer as observing
from troupe.orchestrator.insight.why.client import text_of
from troupe.orchestrator.insight.why.facts import ENDED, FOLDER, Diagnosis, DiagnosisReport, keep_report
from troupe.orchestrator.live.mailbox import Mailbox
from troupe.orchestrator.telemetry.console import Console

pytestmark = pytest.mark.long
WAIT_S = 60.0


@contextmanager
def observed(folder: Path, what: str) -> Iterator[psutil.Process]:
    """The driver of an observed run that waits for `policy-0`, a separate process."""
    process = Forked(observed_run.server(), {"folder": str(folder), "what": what}, [])
    driver = psutil.Process(process.pid)  # now: a run that ends leaves no zombie
    try:
        deadline = time.monotonic() + WAIT_S
        while not (folder / "ready").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield driver
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def ask(folder: Path, *options: str) -> dict[str, Any]:
    """What `troupe why --json` prints."""
    done = run_command("why", str(folder), "--json", *options, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ask_until(folder: Path, words: str) -> dict[str, Any]:
    """What it prints once its cause or summary has these words; the driver stops running after it is ready."""
    deadline = time.monotonic() + WAIT_S
    while words not in (said := ask(folder))["cause"] + said["summary"] and time.monotonic() < deadline:
        pass
    return said


def test_a_run_that_waits_answers_itself(tmp_path: Path) -> None:
    with observed(tmp_path, "waits"):
        said = ask(tmp_path)
        suspend(psutil.Process(int((tmp_path / "ready").read_text())))
        stopped = ask(tmp_path)
    assert said["summary"].startswith("step 1 waits for policy-0 (update, ")
    assert stopped["cause"] == "worker_stopped"
    wait_for(lambda: not [*(tmp_path / FOLDER).glob("answer-*"), *(tmp_path / FOLDER).glob("request-*")])


def test_a_blocked_event_loop_is_named_with_its_line(tmp_path: Path) -> None:
    with observed(tmp_path, "blocks"):
        said = ask_until(tmp_path, "driver_blocked")
    assert said["cause"] == "driver_blocked"
    assert "time.sleep(300)" in said["summary"]


def test_a_driver_whose_threads_do_not_run_is_examined_from_outside(tmp_path: Path) -> None:
    with observed(tmp_path, "holds the interpreter"):
        said = ask_until(tmp_path, "re.match")
    assert said["summary"].startswith("the driver does not answer: its process")
    assert 're.match(r"(a+)+$"' in said["summary"]


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount file systems")
def test_a_run_folder_on_a_disk_that_hangs_is_examined_from_outside(tmp_path: Path) -> None:
    with own_disk(tmp_path / "disk", 32) as disk, observed(disk, "waits"), frozen(disk):
        said = ask_until(disk, "disk")  # the driver hangs when it next writes what it waits for
    assert said["cause"] == "disk"
    assert "waits for the disk (state D" in said["summary"]


def test_a_stopped_driver_is_named(tmp_path: Path) -> None:
    with observed(tmp_path, "waits") as driver:
        suspend(driver)
        said = ask(tmp_path)
    assert said["cause"] == "driver_stopped"


def test_a_dead_driver_is_named_with_what_it_waited_for(tmp_path: Path) -> None:
    with observed(tmp_path, "waits") as driver:
        (tmp_path / "metrics.jsonl").touch()
        (tmp_path / "events.jsonl").write_text('{"time": 1.0, "step": 3, "event": "checkpoint"}\n')
        driver.kill()
        driver.wait()
        said = ask(tmp_path)
    assert said["cause"] == "driver_dead"
    assert any("last event" in line and "checkpoint" in line for line in said["evidence"])
    assert "waiting for policy-0 (update" in said["summary"]


def test_the_last_report_of_a_run_that_failed_is_kept(tmp_path: Path) -> None:
    with observed(tmp_path, "fails") as driver:
        driver.wait(WAIT_S)
        said = ask(tmp_path)
    assert said["cause"] == "run_failed"
    assert "step 1 (update) failed: policy-0.update: its process has died; policy-0 (process" in said["summary"]


def test_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    with observed(tmp_path, "ends") as driver:
        driver.wait(WAIT_S)
        assert ask(tmp_path)["summary"] == "the run has stopped before its first step"


def test_a_run_that_was_refused_says_why(tmp_path: Path) -> None:
    with observed(tmp_path, "is refused") as driver:
        driver.wait(WAIT_S)
        assert (
            ask(tmp_path)["summary"] == "the run has failed before its first step: NeverFits: no node is large enough"
        )


def test_why_of_a_run_that_has_ended_names_the_report() -> None:
    report = DiagnosisReport(0.0, 1, Diagnosis("ended", "the run has finished after 2 of 2 steps"), 0.0)
    said = text_of(report, Path("runs/my run")).splitlines()[1:]
    assert said == ["  what it learned, or why it did not: `troupe report 'runs/my run'`"]


def test_a_stage_that_has_ended_says_so_while_its_process_runs_the_next_one(tmp_path: Path) -> None:
    with observed(tmp_path, "ends a stage"):
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / FOLDER / ENDED.name).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ask(tmp_path)["summary"] == "the run has stopped before its first step"


def test_a_folder_without_a_run_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    done = run_command("why", str(tmp_path / "nothing"), timeout_s=WAIT_S)
    assert (done.returncode, "no such folder" in done.stderr) == (2, True)


def test_only_the_newest_reports_are_kept(tmp_path: Path) -> None:
    for second in range(30):
        keep_report(tmp_path, DiagnosisReport(float(second), 1, Diagnosis("busy", f"at {second}")))
    texts = [path.read_text().strip() for path in sorted((tmp_path / "reports").iterdir())]
    assert texts == [f"at {second}" for second in range(10, 30)]


def test_the_last_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = DiagnosisReport(1.0, 2, Diagnosis("full", "/ is full", "/ on n1", ("a line",)), 0.5)
    ENDED.write(tmp_path, report)
    assert ENDED.read(tmp_path) == report


def test_what_cannot_be_read_is_no_report(tmp_path: Path) -> None:
    (tmp_path / ENDED.name).write_text("{")
    assert ENDED.read(tmp_path) is None


@pytest.mark.parametrize(("lines", "median"), [(2, 0.0), (5, 3.0)])
def test_the_usual_step_is_the_median_of_the_last_ones(tmp_path: Path, lines: int, median: float) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "seconds/step": float(n)}) + "\n" for n in range(1, lines + 1)))
    assert observing._median_step(path) == median


@pytest.fixture
async def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "logs", {"policy-0": os.getppid(), "environment-0": os.getpid()})


@pytest.fixture
async def observer(tmp_path: Path, cluster: Cluster) -> AsyncIterator[observing.RunObserver]:
    """An observer in this process."""
    with closing(observing.RunObserver(tmp_path, "demo", Console(io.StringIO()), cast("Any", cluster))) as made:
        yield made


async def test_a_diagnosis_that_fails_is_an_answer(
    tmp_path: Path, cluster: Cluster, observer: observing.RunObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "inspect", lambda *_: (_ for _ in ()).throw(ValueError("what is \udcff?")))
    content = await asyncio.to_thread(Mailbox(tmp_path / FOLDER).ask, b"", WAIT_S)
    answer = ENDED.decode(content)
    assert answer is not None
    assert answer.diagnosis == Diagnosis("unknown", "the diagnosis failed: ValueError: what is ??")
    with pytest.raises(WorkerDied), observer.reporting():
        raise WorkerDied("policy-0", "update", "its process has died")
    ended = ENDED.read(tmp_path / FOLDER)
    assert ended is not None and ended.diagnosis.cause == "run_failed"
    assert "its process has died; the diagnosis failed: ValueError" in ended.diagnosis.summary


async def test_a_run_leaves_its_last_report_where_the_list_of_reports_cannot_be_written(
    tmp_path: Path, observer: observing.RunObserver
) -> None:
    (tmp_path / FOLDER / "reports").touch()
    with pytest.raises(WorkerDied), observer.reporting():
        raise WorkerDied("policy-0", "update", "its process has died")
    ended = ENDED.read(tmp_path / FOLDER)
    assert ended is not None and ended.diagnosis.cause == "run_failed"


async def test_the_workers_behind_a_call_are_known(cluster: Cluster, observer: observing.RunObserver) -> None:
    assert observer._known().workers == {}
    cluster.calls.begin("rollout-0", "generate", 600.0)
    assert observer._known().workers == {"environment-0": os.getpid()}


async def test_a_call_reports_itself_at_half_of_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "_SNAPSHOT_S", 0.2)
    monkeypatch.setattr(observing, "_PAUSE_S", 0.5)
    cluster = Cluster(tmp_path, {"policy-0": os.getppid()})
    cluster.events.open(tmp_path, 0)
    with closing(observing.RunObserver(tmp_path, "demo", Console(io.StringIO()), cast("Any", cluster))):
        cluster.calls.begin("policy-0", "update", 4.0)
        cluster.calls.begin("environment-0", "watch", 0.1)
        deadline = time.monotonic() + WAIT_S
        while not (events := (tmp_path / "events.jsonl").read_text()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # the alarm is recorded after its report, by this thread
        reports = list((tmp_path / FOLDER).glob("reports/*"))
    assert len(reports) == 1
    assert "waits for policy-0 (update" in events
    waited = re.search(r"waits for policy-0 \(update, (\d+) s of 4 s\)", reports[0].read_text())
    assert waited is not None and int(waited[1]) >= 2

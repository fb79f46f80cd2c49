"""Recording a run: events, timelines, the bound on disk, and resumption."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.recorder import RunRecorder, delete_oldest
from troupe.orchestrator.telemetry.run_folder import RunFolder, step_files
from troupe.orchestrator.telemetry.timeline import CallLog


def call(log: CallLog, worker: str, method: str) -> None:
    log.end(log.begin(worker, method, 1.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text("name: tiny\n")
    return tmp_path


def phases(folder: Path, step: int | None = None) -> list[tuple[int, str, str]]:
    table = RunFolder(folder).timeline(step)
    return list(zip(*(table[name].to_pylist() for name in ("step", "worker", "phase")), strict=True))


def test_every_step_has_the_spans_that_ended_in_it_and_the_last_one_what_ended_after_it(folder: Path) -> None:
    async def run() -> None:
        log = CallLog()
        recorder = RunRecorder(log, EventLog(), folder)
        call(log, "rollout-0", "start")
        await recorder.end_step(0)
        recorder.events.step = 1
        with recorder.phase("generate"):
            call(log, "rollout-0", "generate")
        await recorder.end_step(1)
        call(log, "policy-0", "save")
        await recorder.close()
        await recorder.close()

    asyncio.run(run())
    assert phases(folder) == [
        *((0, "rollout-0", "start"), (1, "rollout-0", "generate"), (1, "driver-0", "generate")),
        (1, "policy-0", "checkpoint"),
    ]
    assert not list((folder / "timeline").glob(".*"))


def test_a_resumed_run_drops_timelines_samples_and_events_after_its_step(folder: Path) -> None:
    for name in ("timeline", "trajectories"):
        (folder / name).mkdir()
        for step in range(4):
            (folder / name / f"step-{step:06d}.parquet").write_bytes(b"x")
    (folder / "events.jsonl").write_text("".join(f'{{"step": {step}, "event": "weights"}}\n' for step in range(4)))
    events = EventLog()
    events.record("worker_started", worker="rollout-0")
    events.open(folder, 2)
    events.record("run_started")
    RunRecorder(CallLog(), events, folder, resume_at=2)
    run = RunFolder(folder)
    assert list(run.timeline_files()) == list(run.sample_files()) == [0, 1, 2]
    assert [(line["step"], line["event"]) for line in run.events()] == [
        *((0, "weights"), (1, "weights"), (2, "weights"), (0, "worker_started"), (2, "run_started"))
    ]
    RunRecorder(CallLog(), events, folder)
    assert not run.timeline_files() and not run.sample_files()


def test_the_oldest_steps_are_deleted_until_the_rest_fits(folder: Path) -> None:
    for name, size in (("timeline", 10), ("trajectories", 90)):
        (folder / name).mkdir()
        for step in range(1, 6):
            (folder / name / f"step-{step:06d}.parquet").write_bytes(b"x" * size)
    assert delete_oldest(folder, 350) == [1, 2]
    assert list(step_files(folder / "timeline")) == list(step_files(folder / "trajectories")) == [3, 4, 5]
    assert delete_oldest(folder, 350) == []
    assert delete_oldest(folder, 1) == [3, 4]  # the newest stays


@pytest.fixture
def no_folder(folder: Path) -> Iterator[Path]:
    """A file where the folder of timelines belongs, as a disk that takes no more."""
    (folder / "timeline").write_text("in the way")
    yield folder


def test_a_timeline_that_cannot_be_written_is_a_warning(no_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log = CallLog()
        recorder = RunRecorder(log, EventLog(), no_folder)
        call(log, "rollout-0", "generate")
        await recorder.end_step(1)
        await recorder.flush()
        call(log, "rollout-0", "generate")
        await recorder.end_step(2)
        await recorder.close()

    asyncio.run(run())
    assert "the timeline of step 1 is not written" in caplog.text and "step 2" in caplog.text


def test_a_slow_disk_delays_no_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end while the first timeline is being written; in the end every one is written."""
    released = threading.Event()
    write = RunRecorder._write

    def slow(*args: object, **kwargs: object) -> None:
        released.wait(30.0)
        write(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    async def run() -> None:
        log = CallLog()
        recorder = RunRecorder(log, EventLog(), folder)
        for step in range(1, 6):
            call(log, "rollout-0", "generate")
            await recorder.end_step(step)
        assert not RunFolder(folder).timeline_files()
        released.set()
        await recorder.close()

    monkeypatch.setattr(RunRecorder, "_write", slow)
    asyncio.run(run())
    assert [step for step, _, _ in phases(folder)] == [1, 2, 3, 4, 5]

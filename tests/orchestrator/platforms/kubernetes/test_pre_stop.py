"""The preStop hook of pods."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
import pytest

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.platforms.kubernetes.pre_stop import has_actors, main, stop_jobs, wait_for_actors
from troupe.orchestrator.platforms.ray_jobs import JobState


@contextmanager
def titled(title: str) -> Iterator[psutil.Process]:
    """A process with this title, as Ray sets it."""
    command = subprocess.Popen(["bash", "-c", f'exec -a "{title}" sleep 60'])
    process = psutil.Process(command.pid)
    try:
        while process.cmdline()[:1] != [title]:
            assert command.poll() is None
        yield process
    finally:
        command.kill()
        command.wait()


@pytest.mark.parametrize(
    ("title", "waits"),
    [
        ("ray::PolicyWorker", True),
        ("ray::RolloutWorker.generate", True),
        ("ray::IDLE", False),
        ("ray::IDLE_SpillWorker", False),
        ("ray::DashboardAgent", False),
        ("ray::RuntimeEnvAgent", False),
        ("raylet", False),
    ],
)
def test_a_worker_pod_waits_for_the_actors_of_a_run(title: str, waits: bool) -> None:
    with titled(title) as process:
        assert has_actors([process]) is waits


def test_a_process_that_has_ended_is_no_actor() -> None:
    with titled("ray::PolicyWorker") as process:
        pass
    assert has_actors([process]) is False


def test_waiting_ends_with_the_actors_or_at_the_timeout() -> None:
    answers = iter([True, True, False])
    assert wait_for_actors(60, lambda: next(answers))
    assert not wait_for_actors(0, lambda: True)


@dataclass
class Server:
    """A job server with jobs of these states."""

    states: dict[str, str]
    stopped: list[str] = field(default_factory=list)

    def jobs(self) -> list[JobState]:
        return [JobState(job, "", status, "running", 1.0, "") for job, status in self.states.items()]

    def stop(self, job: str, timeout_s: float) -> JobState:
        assert 0 < timeout_s <= 60
        self.stopped.append(job)
        return JobState(job, "", "STOPPED", "stopped", 1.0, "")


def test_the_head_stops_the_jobs_that_run() -> None:
    server = Server({"a": "RUNNING", "b": "SUCCEEDED", "c": "PENDING", "d": "STOPPED"})
    stop_jobs(cast("Any", server), 60)
    assert server.stopped == ["a", "c"]


def test_a_job_that_does_not_end_in_time_fails_the_hook(capfd: pytest.CaptureFixture[str]) -> None:
    class Stuck(Server):
        def stop(self, job: str, timeout_s: float) -> JobState:
            raise TroupeError(f"{job} has not ended")

    with pytest.raises(TroupeError, match="a has not ended"):
        stop_jobs(cast("Any", Stuck({"a": "RUNNING"})), 60)
    assert main(["--stop-jobs", "--timeout-s", "1"]) == 1  # no job server here


def test_the_module_is_a_command() -> None:
    command = [sys.executable, "-m", "troupe.orchestrator.platforms.kubernetes.pre_stop", "--help"]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout

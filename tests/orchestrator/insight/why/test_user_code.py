"""Bugs of a user's reward function or environment are named with their line; real processes, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.stalls import planted_environment
from tests.processes import descendants
from troupe.orchestrator.cluster.inspection import InspectRequest, inspect_node
from troupe.orchestrator.insight.why.diagnosis import diagnose
from troupe.orchestrator.insight.why.facts import Call, Diagnosis, DriverFacts, Facts, RunFacts
from troupe.workers.telemetry.stacks import VARIABLE

WAIT_S = 60.0


@contextmanager
def worker(folder: Path, what: str, bug: str) -> Iterator[int]:
    """A worker whose user code has this bug, once it runs."""
    control, ready = folder / "bug", folder / "ready"
    control.write_text(bug)
    command = [sys.executable, "-m", "tests.orchestrator.insight.why.user_code", what, str(control), str(ready)]
    env = os.environ | planted_environment(folder / "order") | {VARIABLE: str(folder / "stacks")}
    with subprocess.Popen(command, cwd=ROOT, env=env) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield process.pid
        finally:
            for child in descendants(process.pid):
                child.kill()
            process.kill()


def diagnosis_of(folder: Path, pid: int, worker: str, call: Call, cause: str) -> Diagnosis:
    """What follows from a look at the worker once its user code runs, which is soon after it is ready."""
    deadline = time.monotonic() + WAIT_S
    while (found := diagnosis(folder, pid, worker, call)).cause != cause and time.monotonic() < deadline:
        pass
    return found


def diagnosis(folder: Path, pid: int, worker: str, call: Call) -> Diagnosis:
    """What follows from a look at the worker, which serves the call."""
    report = inspect_node(InspectRequest({pid: worker}, folder / "stacks"))
    run = RunFacts("demo", steps=6, total=40, step_s=30.0, usual_step_s=2.0)
    pids = {worker: pid} if call.worker == worker else {}
    return diagnose(Facts(run, DriverFacts(1, "n1"), (call,), report.processes, (report.node,), pids))


@pytest.mark.parametrize(
    ("bug", "cause", "words"),
    [
        ("loop", "user_code", "in endless_loop ("),
        ("sleep", "sleep", "sleeps in oversleep ("),
        ("deadlock", "lock", "waits for a lock in _take ("),
    ],
)
def test_a_reward_function(tmp_path: Path, bug: str, cause: str, words: str) -> None:
    with worker(tmp_path, "score", bug) as pid:
        found = diagnosis_of(tmp_path, pid, "reward-0", Call("reward-0", "score", 30.0, 600.0), cause)
    assert (found.cause, found.blocked_by) == (cause, "reward-0")
    assert words in found.summary
    assert "stalling_user_code.py" in found.summary


def test_an_environment(tmp_path: Path) -> None:
    """The driver waits for the engine, the engine for the environment."""
    with worker(tmp_path, "play", "sleep") as pid:
        found = diagnosis_of(tmp_path, pid, "environment-0", Call("rollout-0", "generate", 30.0, 600.0), "sleep")
    assert (found.cause, found.blocked_by) == ("sleep", "environment-0")
    assert "step 7 waits for rollout-0 (generate, 30 s of 600 s): process" in found.summary
    assert "of environment-0 sleeps in step (" in found.summary

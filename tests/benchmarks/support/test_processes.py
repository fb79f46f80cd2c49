"""Child processes of the baselines, and meters of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import psutil
import pytest

from benchmarks.support import processes
from benchmarks.support.processes import (
    RAY_NICENESS,
    ChildFailed,
    Meter,
    RemoteObject,
    SurvivorMeter,
    cpu_seconds,
    stopped,
)
from tests.child_server import Server


@pytest.fixture(scope="module")
def child():
    child = RemoteObject("server", Server, 40)
    yield child
    child.close()


def test_child_answers_and_reports_errors(child: RemoteObject) -> None:
    assert child.call("add", 2, timeout_s=60) == 42
    child.send("add", 1)
    assert child.receive(60) == 43
    with pytest.raises(ChildFailed, match="no such thing"):
        child.call("fail", timeout_s=60)
    assert child.call("niceness", timeout_s=60) == max(RAY_NICENESS, os.nice(0))


def test_cpu_time_counts_the_tree_without_excluded_processes(child: RemoteObject) -> None:
    meter, others = Meter([child.pid]), cpu_seconds([os.getpid()], [child.pid])
    child.call("burn", 0.3, timeout_s=60)
    own, foreign = meter.read()
    assert 0.25 < own < 5.0 and foreign >= 0.0
    assert cpu_seconds([os.getpid()], [child.pid]) - others < 0.25
    assert cpu_seconds([os.getpid()]) > own


def test_a_meter_of_this_process_does_not_count_its_own_search(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, search = Meter([os.getpid()]), processes._trees

    def slow(roots: Iterable[int], without: Sequence[int]) -> list[psutil.Process]:
        until = time.thread_time() + 0.5
        while time.thread_time() < until:
            pass
        return search(roots, without)

    monkeypatch.setattr(processes, "_trees", slow)
    own, foreign = meter.read()
    assert -0.05 < own < 0.3 and foreign >= 0.0


def test_stopped_processes_are_suspended_and_resumed(child: RemoteObject) -> None:
    below = psutil.Process(child.call("leave_child", timeout_s=60))
    with stopped([os.getpid()], without=[child.pid]):
        assert below.status() != psutil.STATUS_STOPPED
        assert child.call("add", 0, timeout_s=60)
    with stopped([child.pid]):
        deadline = time.monotonic() + 10.0
        while below.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)  # a signal takes its time
        assert below.status() == psutil.STATUS_STOPPED
        child.send("niceness")
        with pytest.raises(ChildFailed, match="no answer"):
            child.receive(0.5)
    assert child.receive(60) == max(RAY_NICENESS, os.nice(0))


def test_closing_a_child_ends_its_descendants_and_removes_its_semaphores() -> None:
    """The process of multiprocessing that is left with them reports them as leaked at the end of a benchmark."""
    child = RemoteObject("server", Server, 0)
    below = psutil.Process(child.call("leave_child", timeout_s=60))
    semaphore = child.call("make_semaphore", timeout_s=60)
    assert semaphore.exists()
    child.close()
    assert not semaphore.exists()
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE
    child.close()


def test_survivor_meter_ignores_killed_processes() -> None:
    """A killed process neither counts nor subtracts; a process started later counts."""
    burn = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass\nprint(); input()"

    def burnt(seconds: float) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", burn.format(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        return child

    gone = burnt(1.0)
    meter = SurvivorMeter([os.getpid()])
    come = burnt(0.5)
    try:
        gone.kill()
        gone.communicate()
        own, foreign = meter.read()
    finally:
        come.kill()
        come.communicate()
    assert 0.4 < own < 1.4  # of this process, and of the one that came
    assert foreign >= 0

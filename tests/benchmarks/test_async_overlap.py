"""The steps and the bound of async_overlap."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.async_overlap import (
    BOUND,
    GAP,
    REWARD,
    MeteredConsole,
    bound_of,
    measured,
    parse,
    turn_of,
)
from benchmarks.support.harness import NotCorrect


def line(generate: float, update: float, reward: float = 0.5) -> dict[str, float]:
    """A step that spends nothing outside of its phases but a second."""
    return {
        "seconds/generate": generate,
        "seconds/prepare": 0.5,
        "seconds/update": update,
        "seconds/sync": 0.25,
        "seconds/step": generate + update + 1.75,
        "reward/mean": reward,
        "policy/rollout_logprob_gap": 0.02 * reward,
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
    }


def test_the_bound_is_the_slower_stage_of_the_run_that_alternates() -> None:
    alone = turn_of([line(2.0, 4.0), line(4.0, 6.0, reward=1.0)], sequences=8, cpu_s=9.0, foreign=0.1)
    assert (alone.wall_s, alone.amount) == (2.0 + 4.0 + 4.0 + 6.0 + 2 * 1.75, 16.0)
    assert alone.figures[REWARD] == 0.75 and alone.figures[GAP] == pytest.approx(0.015)
    bound = bound_of(alone)
    assert (bound.wall_s, bound.amount) == (4.0 + 6.0 + 2 * 0.5, 16.0)
    assert bound.figures["R of a step, s"] == 3.0 and bound.figures["T of a step, s"] == 5.5
    assert bound.figures["step, s"] == 5.5 and bound.figures["weight sync of a step, s"] == 0.25
    assert bound.rate > alone.rate and BOUND == "bound"


def test_steps_of_the_filling_and_the_draining_pipeline_are_not_measured() -> None:
    lines = [line(float(step), 1.0) for step in range(8)]
    assert [one["seconds/generate"] for one in measured(lines, 2)] == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(NotCorrect, match="no step of 4"):
        measured(lines[:4], 2)


def test_the_time_of_processes_that_end_after_the_last_step_is_no_other_load() -> None:
    code = "import sys, time\nwhile time.process_time() < 1:\n    pass\nprint(flush=True)\nsys.stdin.read()"
    console = MeteredConsole()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        console.step(1, {})
        worker.communicate()
    assert console.taken[0] > 0.9  # less the search for it


def test_the_run_that_alternates_is_needed() -> None:
    assert parse([]).staleness == [0, 1, 2]
    with pytest.raises(SystemExit):
        parse(["--staleness", "1", "2"])


def test_all_threads_of_a_worker_and_its_processes_stay_on_one_core() -> None:
    code = (
        "import os, subprocess, threading, time\n"
        "from benchmarks.support.pinned_workers import cores, pin\n"
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pin(cores()[0])\n"
        "threads = [int(name) for name in os.listdir('/proc/self/task')] + [child.pid]\n"
        "assert len(threads) > 2\n"
        "print({tuple(os.sched_getaffinity(thread)) for thread in threads})\n"
        "child.kill()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == str({(min(os.sched_getaffinity(0)),)}), found.stderr

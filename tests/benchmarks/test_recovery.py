"""Pure parts of the benchmark of recovery: what makes it refuse to report, and whose CPU time counts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness import NotCorrect, Turn
from benchmarks.processes import SurvivorMeter
from benchmarks.recovery import Gate, parse
from benchmarks.recovery_stage import Recovered
from tests.test_benchmarks import SETTINGS

GROUPS, SAMPLES = 2, 3
RECOVERY = replace(SETTINGS, lengths="fixed", groups=GROUPS, samples=SAMPLES, max_tokens=4)


def recovered(turn: int = 1, **changes: Any) -> Recovered:
    """As it should be after so many turns."""
    trained = turn * GROUPS * SAMPLES
    good = Recovered(
        turn=Turn(20.0, 1, 30.0, 0.0),
        response_ids=[[1, 2, 3, 4]] * (GROUPS * SAMPLES),
        retried=GROUPS,
        restarts=1,
        books={"dispatched": trained, "trained": trained, "dropped": 0, "in_flight": 0, "retries": turn * GROUPS},
        gap=0.001,
        stale=0.2,
    )
    return replace(good, **changes)


def test_a_recovery_that_lost_nothing_passes() -> None:
    gate = Gate(RECOVERY)
    gate.turn(recovered(1))
    gate.turn(recovered(2, gap=0.002, stale=0.3))
    checks = gate.checks()
    assert checks["nothing lost"] == "4 groups of 3 samples were sampled again, each once"
    assert checks["sampler to trainer"].startswith("0.0020 nats a token at most on fresh engines, 0.2000 at least")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"response_ids": [[1, 2, 3, 4]] * 5}, "5 responses"),
        ({"response_ids": [[1, 2, 3]] * 6}, "of \\[3\\] tokens"),
        ({"retried": 1}, "1 of 2 groups were sampled again"),
        ({"restarts": 0}, "on 0 fresh engines"),
        ({"books": {"trained": 5, "dropped": 1, "in_flight": 0}}, "the ledger has"),
        ({"books": {"trained": 6, "dropped": 0, "in_flight": 3}}, "the ledger has"),
        ({"gap": 0.11}, "0.1100 nats a token from the trainer's weights"),
        ({"gap": float("nan")}, "nan nats"),
        ({"gap": 0.05, "stale": 0.06}, "0.0600 from those it started with"),
    ],
)
def test_a_recovery_that_lost_something_or_has_old_weights_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(NotCorrect, match=complaint):
        Gate(RECOVERY).turn(recovered(**changes))


def test_what_is_counted_of_processes_that_are_killed() -> None:
    """A process that was there counts no more when it is gone, and takes nothing off; one that came since counts."""
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


def test_the_command_line_of_recovery() -> None:
    given = parse(["--turns", "2", "--dtype", "float32"])
    assert (given.turns, given.dtype, given.groups, given.samples) == (2, "float32", 2, 4)

"""Peak memory: of processes, and of roles from what their workers answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.peak_memory import GIB, PeakMemory
from workers.messages import Peak, RewardSummary, ScoreSummary, UpdateMetrics, WeightAck, WorkerHealth
from workers.peaks import resident_peak

HELD = 64 << 20
SLACK = 4 << 20
"""The kernel counts resident pages of running threads a little late."""
HOLD = f"""
held = bytearray({HELD})
held[::4096] = bytes([1]) * len(held[::4096])
del held
print("held", flush=True)
input()
"""


def test_the_peak_stays_when_memory_is_given_back() -> None:
    held = bytearray(HELD)
    held[::4096] = bytes([1]) * len(held[::4096])
    grown = resident_peak()
    del held
    assert grown > HELD
    assert resident_peak() >= grown - SLACK


def test_other_processes_count_at_their_own_peak_and_those_that_are_gone_count_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert resident_peak([child.pid]) - resident_peak() > HELD - SLACK
        child.stdin.write(b"\n")
    assert resident_peak([child.pid]) - resident_peak() < SLACK


def test_the_largest_worker_of_a_role_counts_for_good() -> None:
    peaks = PeakMemory()
    peaks.note("rollout-0", WeightAck("rollout-0", 1, "d", 0.1, peak=Peak(3 * GIB, GIB)))
    peaks.note("rollout-1", WeightAck("rollout-1", 1, "d", 0.1, peak=Peak(2 * GIB, 4 * GIB)))
    peaks.note("reward-0", RewardSummary("p", 0, (), (), {}, peak=Peak(GIB)))
    peaks.note("reward-0", RewardSummary("p", 0, (), (), {}, peak=Peak(GIB // 2)))
    peaks.note("reference-0", (3, None))
    peaks.note("policy-0", UpdateMetrics({}, {}))
    figures = peaks.metrics()
    assert figures.pop("memory/driver") == pytest.approx(resident_peak() / GIB, rel=0.1)
    assert figures == {"memory/reward": 1.0, "memory/rollout": 3.0, "memory/rollout_gpu": 4.0}
    assert peaks.summary().startswith("reward 1.00, rollout 3.00, driver ")
    assert peaks.summary().endswith(", rollout_gpu 4.00 GiB")


def test_what_memory_an_answer_tells_does_not_make_it_another_answer() -> None:
    assert ScoreSummary(3, peak=Peak(1)) == ScoreSummary(3)
    assert WorkerHealth("a", "host", 1, 2, 0, peak=Peak(1)) == WorkerHealth("a", "host", 1, 2, 0)

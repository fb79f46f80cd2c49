"""Peak memory by role."""

from __future__ import annotations

import pytest

from troupe.orchestrator.telemetry.peak_memory import PeakMemory
from troupe.workers.contract.messages import Peak, RewardSummary, UpdateMetrics, WeightAck
from troupe.workers.contract.units import GIB
from troupe.workers.telemetry.peak_memory import resident_peak


def test_the_largest_worker_of_a_role_keeps_its_peak() -> None:
    peaks = PeakMemory()
    peaks.note("rollout-0", WeightAck("rollout-0", 1, "d", 0.1, peak=Peak(3 * GIB, GIB)))
    peaks.note("rollout-1", WeightAck("rollout-1", 1, "d", 0.1, peak=Peak(2 * GIB, 4 * GIB)))
    peaks.note("reward-0", RewardSummary("p", 0, (), (), {}, peak=Peak(GIB)))
    peaks.note("reward-0", RewardSummary("p", 0, (), (), {}, peak=Peak(GIB // 2)))
    peaks.note("reference-0", (3, None))
    peaks.note("policy-0", UpdateMetrics({}, {}))
    metrics = peaks.metrics()
    assert metrics.pop("memory/driver") == pytest.approx(resident_peak() / GIB, rel=0.1)
    assert metrics == {"memory/reward": 1.0, "memory/rollout": 3.0, "memory/rollout_gpu": 4.0}
    assert peaks.summary().startswith("reward 1.00, rollout 3.00, driver ")
    assert peaks.summary().endswith(", rollout_gpu 4.00 GiB")

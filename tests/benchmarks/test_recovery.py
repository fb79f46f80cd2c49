"""Checks of recovery."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.recovery import RecoveryGate
from benchmarks.support.harness import NotCorrect, Turn
from benchmarks.support.recovery_setup import Recovered
from tests.benchmarks.settings import SETTINGS

GROUPS = 2


SAMPLES = 3


RECOVERY = replace(SETTINGS, lengths="fixed", groups=GROUPS, samples=SAMPLES, max_tokens=4)


def recovered(turn: int = 1, **changes: Any) -> Recovered:
    """As it should be after so many turns."""
    trained = turn * GROUPS * SAMPLES
    good = Recovered(
        turn=Turn(20.0, 1, 30.0, 0.0),
        response_ids=[[1, 2, 3, 4]] * (GROUPS * SAMPLES),
        retried=GROUPS,
        restarts=1,
        ledger={"dispatched": trained, "trained": trained, "dropped": 0, "in_flight": 0, "retries": turn * GROUPS},
        gap=0.001,
        stale=0.2,
    )
    return replace(good, **changes)


def test_a_recovery_that_lost_nothing_passes() -> None:
    gate = RecoveryGate(RECOVERY)
    gate.turn(recovered(1))
    gate.turn(recovered(2, gap=0.002, stale=0.3))
    checks = gate.checks()
    assert checks["nothing lost"] == "4 groups of 3 samples were sampled again, each once"
    assert checks["sampler to trainer"].startswith("0.0020 nats per token at most on fresh engines, 0.2000 at least")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"response_ids": [[1, 2, 3, 4]] * 5}, "5 responses"),
        ({"response_ids": [[1, 2, 3]] * 6}, "of \\[3\\] tokens"),
        ({"retried": 1}, "1 of 2 groups were sampled again"),
        ({"restarts": 0}, "on 0 fresh engines"),
        ({"ledger": {"trained": 5, "dropped": 1, "in_flight": 0}}, "the ledger has"),
        ({"ledger": {"trained": 6, "dropped": 0, "in_flight": 3}}, "the ledger has"),
        ({"gap": 0.11}, "0.1100 nats per token from the trainer's weights"),
        ({"gap": float("nan")}, "nan nats"),
        ({"gap": 0.05, "stale": 0.06}, "0.0600 from the weights it was loaded with"),
    ],
)
def test_a_recovery_that_lost_something_or_has_old_weights_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(NotCorrect, match=complaint):
        RecoveryGate(RECOVERY).turn(recovered(**changes))

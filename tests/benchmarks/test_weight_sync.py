"""Checks of weight_sync."""

from __future__ import annotations

import pytest

from benchmarks.support.harness import NotCorrect
from benchmarks.weight_sync import SyncGate


def test_sync_gate_passes_new_weights_and_says_what_it_saw() -> None:
    gate = SyncGate(12)
    gate.turn("disk", stale=0.5, fresh=0.01, tokens=12)
    gate.turn("troupe", stale=0.3, fresh=0.02, tokens=12)
    gate.digest("a")
    gate.digest("b")
    checks = gate.checks()
    assert checks["sampler to trainer"].startswith("0.0200 nats per token at most after a sync, 0.3000 at least before")
    assert checks["digests"].startswith("2 versions")


@pytest.mark.parametrize(
    ("stale", "fresh", "tokens", "message"),
    [
        (0.5, 0.2, 12, "0.2000 nats per token"),
        (0.5, float("nan"), 12, "nan nats"),
        (0.03, 0.02, 12, "less than 2 times"),
        (0.5, 0.01, 11, "11 tokens"),
    ],
)
def test_sync_gate_refuses(stale: float, fresh: float, tokens: int, message: str) -> None:
    with pytest.raises(NotCorrect, match=message):
        SyncGate(12).turn("troupe", stale, fresh, tokens)


def test_sync_gate_refuses_weights_that_did_not_change() -> None:
    gate = SyncGate(12)
    gate.digest("a")
    with pytest.raises(NotCorrect, match="digest a"):
        gate.digest("a")

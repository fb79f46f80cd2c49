"""Results of made-up measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from troupe.orchestrator.insight.bench.points import Point
from troupe.orchestrator.insight.bench.results import MeasuredBatch, Result, measures_of
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.contract.measurements import EngineReading, FinishedSequence

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
SEQUENCE = FinishedSequence(0.0, 0.1, 1.0, prompt_tokens=40, cached_tokens=30, response_tokens=20)
BUSY = EngineReading(
    engine="rollout-0",
    sequences=(SEQUENCE,) * 32,
    prefill_s=0.2,
    prefill_tokens=320,
    decode_s=0.8,
    decode_tokens=600,
    running=30.0,
    most_running=32,
    waiting=0.0,
    kv_use=0.3,
    most_kv_use=0.4,
    preemptions=0,
)
"""An engine that computes all of a second."""


def point(settings: Mapping[str, Any] | None = None, path: Path = GRPO) -> Point:
    """A point of the tiny spec."""
    settings = settings or {}
    return Point(settings, load_rollout_spec(path, [f"{field}={value}" for field, value in settings.items()]))


def result(settings: Mapping[str, Any] | None = None, seconds: float = 1.0, **reading: Any) -> Result:
    """One batch of this length, in which every engine is `BUSY` but for these fields."""
    own = point(settings)
    engines = tuple(replace(BUSY, **reading, engine=f"rollout-{number}") for number in range(own.workers))
    batch = MeasuredBatch(seconds, sum(engine.response_tokens for engine in engines), engines)
    return Result(own, measures_of(own, [batch]))

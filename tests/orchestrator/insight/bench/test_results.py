"""The numbers of a point from its readings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.orchestrator.insight.bench.measured import BUSY, SEQUENCE, point
from troupe.orchestrator.insight.bench.results import MeasuredBatch, Spread, measures_of
from troupe.workers.contract.measurements import EngineReading


def batch(seconds: float, *engines: EngineReading) -> MeasuredBatch:
    return MeasuredBatch(seconds, sum(engine.response_tokens for engine in engines), engines)


def test_throughput_is_the_median_of_the_turns_by_engine() -> None:
    measures = measures_of(point({"roles.rollout.workers": 2}), [batch(s, BUSY, BUSY) for s in (1.0, 2.0, 4.0)])
    tokens = 2 * 32 * 20
    assert measures.tokens_per_s == tokens / 2 and measures.per_engine == tokens / 4
    assert (measures.slowest_batch, measures.fastest_batch) == (tokens / 4, tokens)
    assert measures.sequences == 64 and measures.per_gpu is None


def test_speeds_are_of_the_time_in_which_an_engine_computes() -> None:
    idle = replace(BUSY, engine="rollout-1", prefill_s=0.1, decode_s=0.4, sequences=(SEQUENCE,) * 8)
    measures = measures_of(point({"roles.rollout.workers": 2}), [batch(2.0, BUSY, idle)])
    assert measures.prefill_per_s == pytest.approx(2 * 640 / 0.3)
    assert measures.decode_per_s == pytest.approx(2 * 1200 / 1.2)
    assert measures.prefill_share == pytest.approx(0.2)
    assert measures.busy == pytest.approx(0.375) and measures.least_busy == pytest.approx(0.25)
    assert measures.cached == pytest.approx(0.75)


def test_means_are_weighted_with_the_time_of_each_engine() -> None:
    short = replace(BUSY, prefill_s=0.0, decode_s=0.25, running=10.0, kv_use=0.9)
    measures = measures_of(point(), [batch(1.0, BUSY), batch(1.0, short)])
    assert measures.running == pytest.approx((30 + 0.25 * 10) / 1.25)
    assert measures.kv_use == pytest.approx((0.3 + 0.25 * 0.9) / 1.25)


def test_spreads() -> None:
    assert Spread.of([float(value) for value in range(101)]) == Spread(50.0, 99.0)
    assert Spread.of([]) == Spread(0.0, 0.0) and Spread.of([2.0]) == Spread(2.0, 2.0)

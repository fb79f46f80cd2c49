"""What a point of a benchmark measured, and the numbers that describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from troupe.orchestrator.insight.bench.points import Point
from troupe.workers.contract.measurements import EngineReading, FinishedSequence
from troupe.workers.contract.messages import Peak

_NO_PEAK = Peak(0)


@dataclass(frozen=True)
class MeasuredBatch:
    """One batch of prompts, sampled to the end."""

    seconds: float
    response_tokens: int
    engines: tuple[EngineReading, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.response_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Spread:
    """Median and 99th percentile."""

    p50: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of these values; zeros without any."""
        if not values:
            return Spread(0.0, 0.0)
        p50, p99 = np.percentile(np.asarray(values), [50, 99]).tolist()
        return Spread(p50, p99)


@dataclass(frozen=True)
class Measures:
    """The numbers of one point, over all of its batches."""

    batches: int
    sequences: int
    """Sequences of one batch."""
    tokens_per_s: float
    """Sampled tokens per second of all engines: the median of the batches."""
    slowest_batch: float
    """Tokens per second."""
    fastest_batch: float
    per_engine: float
    per_gpu: float | None
    """None on CPUs."""
    prefill_per_s: float
    """Prompt tokens per second that all engines compute while they compute prompts."""
    decode_per_s: float
    """Tokens per second that all engines sample while they compute no prompt."""
    prefill_share: float
    """Share of the engines' time in which they compute prompts."""
    busy: float
    """Share of the time in which the engines compute, on average over engines."""
    least_busy: float
    """The same of the engine that computes least."""
    latency_s: Spread
    """Seconds from a sequence's arrival in the engine to its last token."""
    first_token_s: Spread
    """Seconds from a sequence's arrival in the engine to its first token."""
    queued_s: Spread
    """Seconds that a sequence is queued in the engine."""
    prompt_tokens: float
    """Mean per sequence."""
    response_tokens: float
    cached: float
    """Share of the prompt tokens that were in the prefix cache."""
    kv_use: float
    """Share of the KV cache in use, on average."""
    most_kv_use: float
    preemptions: int
    running: float
    """Sequences that an engine decodes together, on average."""
    most_running: int
    waiting: float
    """Sequences that wait in an engine, on average."""


@dataclass(frozen=True)
class Result:
    """One point of a benchmark."""

    point: Point
    measures: Measures | None
    """None if it could not be measured."""
    problem: str = ""
    """Why it could not be measured."""
    peak: Peak = _NO_PEAK
    """Memory of the largest engine of its launch so far."""
    gpu_type: str = ""
    """Type of the engines' GPUs; empty if they have none or it is unknown."""


def measures_of(point: Point, batches: Sequence[MeasuredBatch]) -> Measures:
    rates = [batch.tokens_per_s for batch in batches]
    readings = [reading for batch in batches for reading in batch.engines]
    sequences = [sequence for reading in readings for sequence in reading.sequences]
    busy_s = sum(reading.busy_s for reading in readings)
    busy = _busy(batches)
    gpus = point.spec.roles.rollout.gpus * point.workers
    total = median(rates)
    return Measures(
        batches=len(batches),
        sequences=round(len(sequences) / len(batches)),
        tokens_per_s=total,
        slowest_batch=min(rates),
        fastest_batch=max(rates),
        per_engine=total / point.workers,
        per_gpu=total / gpus if gpus else None,
        prefill_per_s=point.workers * _rate([(r.prefill_tokens, r.prefill_s) for r in readings]),
        decode_per_s=point.workers * _rate([(r.decode_tokens, r.decode_s) for r in readings]),
        prefill_share=sum(reading.prefill_s for reading in readings) / busy_s if busy_s else 0.0,
        busy=_mean(busy),
        least_busy=min(busy, default=0.0),
        latency_s=Spread.of([sequence.latency_s for sequence in sequences]),
        first_token_s=Spread.of([sequence.first_token_s for sequence in sequences]),
        queued_s=Spread.of([sequence.queued_s for sequence in sequences]),
        prompt_tokens=_mean([sequence.prompt_tokens for sequence in sequences]),
        response_tokens=_mean([sequence.response_tokens for sequence in sequences]),
        cached=_cached(sequences),
        kv_use=_weighted(readings, [reading.kv_use for reading in readings]),
        most_kv_use=max((reading.most_kv_use for reading in readings), default=0.0),
        preemptions=sum(reading.preemptions for reading in readings),
        running=_weighted(readings, [reading.running for reading in readings]),
        most_running=max((reading.most_running for reading in readings), default=0),
        waiting=_weighted(readings, [reading.waiting for reading in readings]),
    )


def _busy(batches: Sequence[MeasuredBatch]) -> list[float]:
    """Share of the time in which each engine computes."""
    seconds = sum(batch.seconds for batch in batches)
    busy: dict[str, float] = {}
    for reading in (reading for batch in batches for reading in batch.engines):
        busy[reading.engine] = busy.get(reading.engine, 0.0) + reading.busy_s
    return [min(1.0, busy_s / seconds) for busy_s in busy.values()]


def _rate(parts: Sequence[tuple[int, float]]) -> float:
    """Tokens per second over readings, each with its tokens and seconds."""
    seconds = sum(part for _, part in parts)
    return sum(tokens for tokens, _ in parts) / seconds if seconds else 0.0


def _weighted(readings: Sequence[EngineReading], values: Sequence[float]) -> float:
    """Mean over readings, each weighted with the time in which its engine computed."""
    busy_s = sum(reading.busy_s for reading in readings)
    if not busy_s:
        return 0.0
    return sum(reading.busy_s * value for reading, value in zip(readings, values, strict=True)) / busy_s


def _cached(sequences: Sequence[FinishedSequence]) -> float:
    prompts = sum(sequence.prompt_tokens for sequence in sequences)
    return sum(sequence.cached_tokens for sequence in sequences) / prompts if prompts else 0.0


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0

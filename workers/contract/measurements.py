"""What a rollout engine measures of itself while it samples, for `troupe bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from troupe.workers.contract.config import SamplingConfig
from troupe.workers.contract.roles import Reply, RolloutEngine


@dataclass(frozen=True)
class FinishedSequence:
    """One finished request of the engine."""

    queued_s: float
    """From its arrival in the engine until it was scheduled."""
    first_token_s: float
    """From its arrival in the engine until its first token."""
    latency_s: float
    """From its arrival in the engine until its last token."""
    prompt_tokens: int
    cached_tokens: int
    """Those of the prompt that were in the prefix cache."""
    response_tokens: int


@dataclass(frozen=True)
class EngineReading:
    """What one engine did since its last reading."""

    engine: str
    sequences: tuple[FinishedSequence, ...]
    prefill_s: float
    """Time of the iterations that computed prompts."""
    prefill_tokens: int
    """Prompt tokens that these iterations computed."""
    decode_s: float
    """Time of the iterations that computed no prompt."""
    decode_tokens: int
    """Tokens that these iterations sampled."""
    running: float
    """Sequences in an iteration, on average over their time."""
    most_running: int
    waiting: float
    """Sequences that waited in the engine for an iteration, on average over its time."""
    kv_use: float
    """Share of the KV cache in use, on average over the time of the iterations."""
    most_kv_use: float
    preemptions: int
    """How often a running sequence lost its place in the KV cache."""

    @property
    def busy_s(self) -> float:
        """Time in which the engine computed."""
        return self.prefill_s + self.decode_s

    @property
    def response_tokens(self) -> int:
        """Tokens of the finished sequences."""
        return sum(sequence.response_tokens for sequence in self.sequences)


class MeasuredEngine(RolloutEngine, Protocol):
    """A rollout engine that measures itself."""

    def use_sampling(self, sampling: SamplingConfig) -> Reply[None]:
        """Samples with these settings from now on."""
        ...

    def read_meter(self) -> Reply[EngineReading]:
        """What the engine did since the last reading."""
        ...

"""vLLM's metrics for Prometheus, unread in a rollout worker.

An engine whose samples are timed has to collect statistics, and then also updates some thirty Prometheus metrics after
every iteration, and one for every token. `AsyncLLM` leaves its own metrics out only if it receives others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import PrometheusStatLogger


def unread_metrics() -> type[PrometheusStatLogger]:
    """The stat logger of an engine that replaces vLLM's own and records nothing. Imports vLLM."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class UnreadMetrics(PrometheusStatLogger):
        def __init__(self, *_: object, **__: object) -> None:
            """Creates no metric."""

        def record(self, *_: object, **__: object) -> None:
            """Called after every iteration of the engine."""

        def record_sleep_state(self, *_: object, **__: object) -> None:
            """Called when the engine rests or wakes."""

        def record_admission_rejection(self, *_: object, **__: object) -> None:
            """Called for a request that is refused because too many wait."""

        def log_engine_initialized(self) -> None:
            """Called once."""

    return UnreadMetrics

"""A separate thread for sinks that may wait for a server, so that the controller does not."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from troupe.orchestrator.telemetry.sinks.base import Metrics, MetricSink

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Steps that wait while the server does not answer; further ones are missing there."""
CLOSE_S = 30.0
"""Longest wait at the end of a run."""


class BackgroundSink:
    """Opens, writes and closes a sink in a thread. Whatever fails there is a warning: a tracker ends no run."""

    def __init__(self, name: str, open_sink: Callable[[], MetricSink]) -> None:
        """`name` is shown in warnings."""
        self._name = name
        self._open = open_sink
        self._waiting: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(_MOST_WAITING)
        self._missing = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Metrics) -> None:
        """Queue one step's metrics."""
        if not self._thread.is_alive():  # the sink has failed, and said so
            self._missing += 1
            return
        try:
            self._waiting.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._missing += 1

    def close(self) -> None:
        """Wait until everything is sent, for at most `CLOSE_S` seconds."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        self._missing += sum(waiting is not None for waiting in self._waiting.queue)
        if self._thread.is_alive():
            logger.warning("%s does not answer: the metrics of the last steps may be missing there", self._name)
        if self._missing:
            logger.warning("%s: the metrics of %d steps are missing there", self._name, self._missing)

    def _run(self) -> None:
        """Consumes the queued steps until `close`, or until the sink fails; runs in the thread."""
        try:
            sink = self._open()
            while (waiting := self._waiting.get()) is not None:
                sink.write(*waiting)
            sink.close()
        except Exception as error:  # a tracker's client can raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            logger.warning("%s records no further metrics: %s", self._name, reason)

"""An endpoint for Prometheus, with the metrics of the latest step."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from troupe.orchestrator.telemetry.sinks.base import Metrics, numbers

logger = logging.getLogger(__name__)

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def prometheus_name(metric: str) -> str:
    """The name of a metric at Prometheus: `troupe_reward_mean` for `reward/mean`."""
    return f"troupe_{_NOT_IN_NAMES.sub('_', metric)}"


class PrometheusSink:
    """Serves `/metrics` on a port, as gauges with the label `run`. An endpoint that cannot be opened is a warning."""

    def __init__(self, run_name: str, host: str, port: int) -> None:
        """Listen. Port 0: any free one (see `port`)."""
        self._run = run_name
        self._latest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self.port = 0
        self._server = None
        try:
            self._server, self._thread = start_http_server(port, host, registry)
            self.port = self._server.server_port
        except OSError as error:
            logger.warning("output.prometheus: cannot listen on %s:%d: %s", host, port, error.strerror or error)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `prometheus_client.registry.Collector`: called for every request, in the server's thread."""
        for name, value in self._latest.items():
            gauge = GaugeMetricFamily(prometheus_name(name), name, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge

    def write(self, step: int, metrics: Metrics) -> None:
        """Serve these metrics from now on. Those that a step does not have (evaluations) keep their last value."""
        latest = max(float(step), self._latest.get("step", 0.0))  # the evaluation of an earlier step may end later
        self._latest = {**self._latest, **numbers(metrics), "step": latest, "step_time_seconds": time.time()}

    def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

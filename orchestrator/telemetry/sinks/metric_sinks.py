"""All sinks of a run together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.sections import BaseOutput, SinkName
from troupe.orchestrator.telemetry.json_lines import JsonLinesFile
from troupe.orchestrator.telemetry.sinks.background import BackgroundSink
from troupe.orchestrator.telemetry.sinks.base import LoggedRun, Metrics, MetricSink
from troupe.orchestrator.telemetry.sinks.mlflow import MlflowSink
from troupe.orchestrator.telemetry.sinks.tensorboard import TensorBoardSink
from troupe.orchestrator.telemetry.sinks.wandb import WandbSink

logger = logging.getLogger(__name__)

_SINKS: dict[SinkName, Callable[[LoggedRun], MetricSink]] = {
    "tensorboard": lambda run: TensorBoardSink(run.folder / "tensorboard", run.keep_through),
    "wandb": lambda run: BackgroundSink("wandb", lambda: WandbSink(run)),
    "mlflow": lambda run: BackgroundSink("mlflow", lambda: MlflowSink(run)),
}


class MetricSinks:
    """All destinations of a run's metrics."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    @classmethod
    def open(cls, run: LoggedRun, output: BaseOutput | None = None) -> MetricSinks:
        """Open `metrics.jsonl` in the run folder, and the sinks of `output`."""
        sinks: list[MetricSink] = [JsonLinesFile(run.folder / "metrics.jsonl", run.keep_through)]
        if output is not None:
            sinks += [_SINKS[name](run) for name in output.sinks]
            if output.prometheus is not None:
                # Imported here because it takes a tenth of a second, and most runs have no endpoint.
                from troupe.orchestrator.telemetry.sinks.prometheus import PrometheusSink

                sinks.append(PrometheusSink(run.name, output.prometheus.host, output.prometheus.port))
        return cls(sinks)

    @classmethod
    def of_spec(cls, spec: RunSpec, folder: Path, resume_at: int) -> MetricSinks:
        """Open the sinks of a spec, for a run that has completed `resume_at` steps."""
        output = spec.output
        return cls.open(LoggedRun(folder, spec.name, resume_at, output.project, spec.model_dump(mode="json")), output)

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step's metrics in every sink. A sink that cannot be written does not end the run."""
        for sink in self._sinks:
            try:
                sink.write(step, metrics)
            except OSError as error:
                logger.warning("the metrics of step %d are missing in %s: %s", step, type(sink).__name__, error)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

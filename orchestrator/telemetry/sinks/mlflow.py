"""MLflow. The tracking server is MLflow's own configuration (`MLFLOW_TRACKING_URI`)."""

from __future__ import annotations

import importlib
import math
import os
import re
import time
from typing import Any

from troupe.orchestrator.telemetry.sinks.base import LoggedRun, Metrics, numbers

_URI = "MLFLOW_TRACKING_URI"
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""Most metrics and parameters of one request to a server."""
_LONGEST_VALUE = 6000
_REFUSED = re.compile(r"[^\w\-. :/]")


class MlflowSink:
    """One run of MLflow; a resumed run continues it. Without a server, its files are in `mlruns/` in the run folder."""

    def __init__(self, run: LoggedRun) -> None:
        """Start or continue the run. May wait for the server."""
        if _URI not in os.environ:
            # MLflow deprecates its file store in favour of a database; without a server it is what needs no package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities: Any = importlib.import_module("mlflow.entities")
        client: Any = importlib.import_module("mlflow.tracking").MlflowClient
        self._client = client(tracking_uri=os.environ.get(_URI) or (run.folder / "mlruns").resolve().as_uri())
        file = run.folder / "mlflow-id"
        if run.resume_at > 0 and file.exists():
            self._id = file.read_text().strip()
            self._client.set_terminated(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(run.project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        file.write_text(f"{self._id}\n")
        config = flat(run.config).items()
        settings = [self._entities.Param(allowed(name), value[:_LONGEST_VALUE]) for name, value in config]
        for start in range(0, len(settings), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=settings[start : start + _MOST_PARAMETERS])

    def write(self, step: int, metrics: Metrics) -> None:
        """Record every finite number."""
        now = int(time.time() * 1000)
        values = [
            self._entities.Metric(allowed(name), value, now, step)
            for name, value in numbers(metrics).items()
            if math.isfinite(value)
        ]
        for start in range(0, len(values), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=values[start : start + _MOST_METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def allowed(name: str) -> str:
    """The name without the characters that MLflow refuses: `eval/pass@2` is `eval/pass_2` there."""
    return _REFUSED.sub("_", name)


def flat(config: object, prefix: str = "") -> dict[str, str]:
    """A nested configuration as one level: `roles.policy.workers`."""
    if isinstance(config, dict) and config:
        return {
            name: value
            for key, inner in config.items()
            for name, value in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: str(config)} if prefix else {}

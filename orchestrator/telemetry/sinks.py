"""Destinations of a run's metrics: `metrics.jsonl`, TensorBoard, trackers and Prometheus."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import math
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.sections import BaseOutput, SinkName
from troupe.orchestrator.telemetry.event_log import Ended
from troupe.orchestrator.telemetry.json_lines import JsonLinesFile
from troupe.workers.contract.text import without_secrets

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

logger = logging.getLogger(__name__)

Metrics = Mapping[str, object]
"""Metrics by name; a few are text (`kind`)."""
_CONNECTIONS, _IDLE_S = 128, 30.0
"""Connections to the endpoint that wait to be taken, and seconds after which one on which nothing arrives is closed."""
_MOST_WAITING = 1000
"""Steps that wait while the server does not answer; further ones are missing there."""
CLOSE_S = 30.0
"""Longest wait at the end of a run."""
_FILES = itertools.count()  # distinguishes event files that one process starts within the same second
_STEP = "step"
_URI = "MLFLOW_TRACKING_URI"
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""Most metrics and parameters of one request to a server."""
_LONGEST_VALUE = 6000
_REFUSED = re.compile(r"[^\w\-. :/]")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class MetricSink(Protocol):
    """Destination of a run's metrics."""

    def write(self, step: int, metrics: Metrics, /) -> None:
        """Record one step's metrics. Does not block for longer than a write to a file."""
        ...

    def close(self) -> None: ...


class TrackedRun(Protocol):
    """A run at a tracker, which shows how it has ended."""

    def write(self, step: int, metrics: Metrics, /) -> None: ...

    def close(self, how: Ended, /) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are recorded."""

    folder: Path
    name: str = ""
    resume_at: int = 0
    """Steps that the run has completed. Records of later steps are dropped if possible; at 0, all."""
    project: str = "troupe"
    """Project of the run; MLflow's experiment."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The resolved spec, without secrets: others may see a tracker."""

    @property
    def keep_through(self) -> int:
        """Last step whose records stay; -1: none."""
        return self.resume_at if self.resume_at > 0 else -1


def numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


class BackgroundSink:
    """Opens, writes and closes a sink in a thread. Whatever fails there is a warning: a tracker ends no run."""

    def __init__(self, name: str, open_sink: Callable[[], TrackedRun]) -> None:
        self._name = name
        self._open = open_sink
        self._waiting: queue.Queue[tuple[int, Metrics] | Ended] = queue.Queue(_MOST_WAITING)
        self._missing = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Metrics) -> None:
        if not self._thread.is_alive():  # the sink has failed, and said so
            self._missing += 1
            return
        try:
            self._waiting.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._missing += 1

    def close(self, how: Ended = "finished") -> None:
        """Wait until everything is sent, for at most `CLOSE_S` seconds."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(how, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        self._missing += sum(not isinstance(waiting, str) for waiting in self._waiting.queue)
        if self._thread.is_alive():
            logger.warning("%s does not answer: the metrics of the last steps may be missing there", self._name)
        if self._missing:
            logger.warning("%s: the metrics of %d steps are missing there", self._name, self._missing)

    def _run(self) -> None:
        """Consumes the queued steps until `close`, or until the sink fails; runs in the thread."""
        try:
            sink = self._open()
            while not isinstance(waiting := self._waiting.get(), str):
                sink.write(*waiting)
            sink.close(waiting)
        except Exception as error:  # a tracker's client can raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            logger.warning("%s records no further metrics: %s", self._name, reason)


class TensorBoardSink:
    """Scalars in TensorBoard's file format, written without torch or TensorFlow."""

    def __init__(self, directory: str | Path, keep_through: int) -> None:
        """Start a new event file; TensorBoard then hides steps after `keep_through` in earlier files."""
        # Imported here because protobuf takes a third of a second to load and most commands write no events.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Protobuf creates the classes at import time, so a type checker has no source to read.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
        self._records = RecordWriter((folder / name).open("ab"))
        self._append(file_version="brain.Event:2")
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._append(step=keep_through + 1, session_log=restart)

    def write(self, step: int, metrics: Metrics) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()
        ]
        self._append(step=step, summary=self._summaries.Summary(value=values))

    def _append(self, **fields: object) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


@dataclass(frozen=True)
class Tracker:
    """A tracker whose package has wandb's functions: `init`, and a run's `log` and `finish`."""

    package: SinkName
    arguments: Callable[[LoggedRun, str], dict[str, Any]]
    """Arguments of `init` besides the project and the configuration, from the run and its id there."""
    ends: Callable[[Ended], dict[str, Any]] = lambda how: {}
    """Arguments of `finish`."""
    names_step: bool = False
    """Whether steps are a metric: wandb's own step must not decrease, but a resumed run records steps again."""


_TRACKERS = (
    Tracker(
        "wandb",
        lambda run, identity: {
            "name": run.name,
            "id": identity,
            "dir": str(run.folder),
            "reinit": "create_new",
            "allow_val_change": True,
        },
        lambda how: {"exit_code": {"finished": 0, "failed": 1, "stopped": 255}[how]},  # wandb's own after Ctrl-C
        names_step=True,
    ),
    Tracker(
        "swanlab",
        lambda run, identity: {"name": run.name, "id": identity, "log_dir": str(run.folder / "swanlog")},
        lambda how: {"state": {"finished": "success", "failed": "crashed", "stopped": "aborted"}[how]},
    ),
    Tracker("trackio", lambda run, identity: {"name": f"{run.name}-{identity}", "embed": False}),
)
"""trackio knows runs by name alone."""


class TrackerSink:
    """One run of a tracker; a resumed run continues it."""

    def __init__(self, tracker: Tracker, run: LoggedRun) -> None:
        """Start or continue the run. May wait for the server."""
        module, arguments = importlib.import_module(tracker.package), tracker.arguments(run, _identity(run, tracker))
        self._run: Any = module.init(project=run.project, config=dict(run.config), resume="allow", **arguments)
        self._ends, self._names_step = tracker.ends, tracker.names_step
        if self._names_step:
            self._run.define_metric(_STEP)
            self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, metrics: Metrics) -> None:
        if self._names_step:
            self._run.log({_STEP: step, **numbers(metrics)})
        else:
            self._run.log(numbers(metrics), step=step)

    def close(self, how: Ended) -> None:
        self._run.finish(**self._ends(how))


def _identity(run: LoggedRun, tracker: Tracker) -> str:
    """The id of the run at a tracker: kept in the run folder, and new for a run that starts from the beginning."""
    file = run.folder / f"{tracker.package}-id"
    if run.resume_at > 0 and file.exists():
        return file.read_text().strip()
    name = secrets.token_hex(8)
    file.write_text(f"{name}\n")
    return name


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
        config = flat_config(run.config).items()
        settings = [self._entities.Param(mlflow_name(name), value[:_LONGEST_VALUE]) for name, value in config]
        for start in range(0, len(settings), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=settings[start : start + _MOST_PARAMETERS])

    def write(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        values = [
            self._entities.Metric(mlflow_name(name), value, now, step)
            for name, value in numbers(metrics).items()
            if math.isfinite(value)
        ]
        for start in range(0, len(values), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=values[start : start + _MOST_METRICS])

    def close(self, how: Ended) -> None:
        self._client.set_terminated(self._id, {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[how])


def mlflow_name(name: str) -> str:
    """The name without the characters that MLflow refuses: `eval/pass@2` is `eval/pass_2` there."""
    return _REFUSED.sub("_", name)


def flat_config(config: object, prefix: str = "") -> dict[str, str]:
    """A nested configuration as one level: `roles.policy.workers`."""
    if isinstance(config, dict) and config:
        return {
            name: value
            for key, inner in config.items()
            for name, value in flat_config(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: str(config)} if prefix else {}


def prometheus_name(metric: str) -> str:
    """The name of a metric at Prometheus: `troupe_reward_mean` for `reward/mean`."""
    return f"troupe_{_NOT_IN_NAMES.sub('_', metric)}"


class PrometheusSink:
    """Serves `/metrics` on a port, as gauges with the label `run`. An endpoint that cannot be opened is a warning."""

    def __init__(self, run_name: str, host: str, port: int) -> None:
        """Listen. Port 0: any free one (see `port`)."""
        # Imported here because it takes a tenth of a second, and most runs have no endpoint.
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run_name
        self._latest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self.port = 0
        self._server = None
        try:
            self._server, self._thread = start_http_server(port, host, registry)
            server: Any = self._server
            server.socket.listen(_CONNECTIONS)
            server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": _IDLE_S})
            self.port = server.server_port
        except OSError as error:
            logger.warning("output.prometheus: cannot listen on %s:%d: %s", host, port, error.strerror or error)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `prometheus_client.registry.Collector`: called for every request, in the server's thread."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._latest.items():
            gauge = GaugeMetricFamily(prometheus_name(name), name, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge

    def write(self, step: int, metrics: Metrics) -> None:
        """Serve these metrics from now on. Those that a step does not have (evaluations) keep their last value."""
        latest = max(float(step), self._latest.get("step", 0.0))  # the evaluation of an earlier step may end later
        self._latest = {**self._latest, **numbers(metrics), "step": latest, "step_time_seconds": time.time()}

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _of(tracker: Tracker) -> Callable[[LoggedRun], MetricSink]:
    return lambda run: BackgroundSink(tracker.package, lambda: TrackerSink(tracker, run))


_SINKS: dict[SinkName, Callable[[LoggedRun], MetricSink]] = {
    "tensorboard": lambda run: TensorBoardSink(run.folder / "tensorboard", run.keep_through),
    "mlflow": lambda run: BackgroundSink("mlflow", lambda: MlflowSink(run)),
    **{tracker.package: _of(tracker) for tracker in _TRACKERS},
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
                sinks.append(PrometheusSink(run.name, output.prometheus.host, output.prometheus.port))
        return cls(sinks)

    @classmethod
    def of_spec(cls, spec: RunSpec, folder: Path, resume_at: int) -> MetricSinks:
        """Open the sinks of a spec, for a run that has completed `resume_at` steps."""
        output = spec.output
        return cls.open(
            LoggedRun(folder, spec.name, resume_at, output.project, without_secrets(spec.model_dump(mode="json"))),
            output,
        )

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step's metrics in every sink. A sink that cannot be written does not end the run."""
        for sink in self._sinks:
            try:
                sink.write(step, metrics)
            except OSError as error:
                logger.warning("the metrics of step %d are missing in %s: %s", step, type(sink).__name__, error)

    def close(self, how: Ended = "finished") -> None:
        """Close every sink of a run that has ended so."""
        for sink in self._sinks:
            sink.close(how) if isinstance(sink, BackgroundSink) else sink.close()

"""Troupe as a library: what `import troupe` offers. The commands call the same functions."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from troupe.orchestrator.errors import StopRequested, UsageError
from troupe.orchestrator.runs.prepare import checked, create_models, single, with_configs
from troupe.orchestrator.signals import SIGNALS_S
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.derived.paths import model_overrides, template_overrides
from troupe.orchestrator.spec.errors import Source
from troupe.orchestrator.spec.load import read_document
from troupe.orchestrator.spec.locations import is_url
from troupe.workers.contract.imports import missing_package

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.orchestrator.controller import RunOutcome
    from troupe.orchestrator.insight.verdicts.verdict import Verdict
    from troupe.orchestrator.live.run_state import RunState
    from troupe.orchestrator.plan.plan import Plan
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.telemetry.console import Console
    from troupe.orchestrator.telemetry.run_folder import RunFolder

T = TypeVar("T")

Overrides = Sequence[str] | Mapping[str, Any]
"""Fields to set: `["schedule.steps=10"]`, or `{"schedule.steps": 10}`."""
PathLike = str | os.PathLike[str]
"""A path: text, or an object that has one, such as a `pathlib.Path`."""
SpecLike = RunSpec | PathLike | Mapping[str, Any]
"""A loaded spec, a YAML file, `examples:NAME`, or a spec as a dict."""
OnStep = Callable[[int, Mapping[str, Any]], None]
"""Called with the number of a step and its metrics."""


def load_spec(source: PathLike | Mapping[str, Any], set: Overrides = ()) -> RunSpec:
    """Load and check a spec.

    Args:
        source: A YAML file, `examples:NAME`, or the spec as a dict.
        set: Fields to set, as `--set` does.

    Raises:
        SpecError: The spec is not valid; one line for every problem.
        UsageError: `set` is not valid, there is no such example, or the file has stages: load the spec of one of them.
    """
    return _planned(source, set).spec


def run(
    spec: SpecLike,
    *,
    set: Overrides = (),
    out: PathLike | None = None,
    resume: bool = False,
    address: str | None = None,
    on_step: OnStep | None = None,
    progress: bool | TextIO = True,
) -> Outcome:
    """Train, and return when the run ends.

    The run folder has a report at the end, also of a run that fails after its first step, but not of one that was asked
    to stop: `Outcome.report` writes it.

    In a notebook the run has its own thread and event loop; interrupting the cell saves and stops, as Ctrl-C does in a
    script. In a program that has started or joined Ray, its cluster is used and left as it was.

    Args:
        spec: The spec.
        set: Fields to set.
        out: Run folder, or None for the spec's.
        resume: Resume from the newest valid checkpoint in the run folder.
        address: Ray cluster to join, or None to start a local one.
        on_step: Called after every step, and with late evaluations, in the thread of the run. Training waits for it; an
            exception ends the run.
        progress: Print the run's progress to standard output, or to this stream.

    Raises:
        SpecError: The spec, or what it names, is not valid.
        UsageError: `set` is not valid, `out` is a URL, there is no such example, or the file has stages, which are
            several runs.
        StopRequested: The user asked the run to stop while its workers started. After that, `Outcome.stopped` says so.
        KeyboardInterrupt: The user interrupted a notebook's cell, whose run has saved and stopped; or any run before
            its workers started.
        TroupeError: The run cannot start or cannot continue.
    """
    stream = _stream(progress)
    planned = _in_place(_planned(spec, set, None if out is None else local_path(out)), stream, resume=resume)
    from troupe.orchestrator.runs.session import RunRequest

    request, console = RunRequest(planned.spec, planned.out, resume, address), _console(on_step, stream)
    try:
        ended = _outside_of_loops(lambda: train(request, console), request)
    except (KeyboardInterrupt, StopRequested):
        raise
    except BaseException:
        _report_at_end(planned.out, console)
        raise
    if not ended.interrupted:
        _report_at_end(planned.out, console)
    return Outcome(planned.out)


def _report_at_end(folder: Path, console: Console) -> None:
    """Write the report of a run that has made a step, and print its path."""
    from troupe.orchestrator.insight.report.report import REPORT, write_last_report

    if console.progress().steps and (file := write_last_report([folder], folder / REPORT)) is not None:
        console.message(f"report: {file}")


def train(request: RunRequest, console: Console) -> RunOutcome:
    """Train as a request specifies, shown on a console, which is closed. Raises TroupeError."""
    from troupe.orchestrator.insight.verdicts.apply import RunningVerdicts
    from troupe.orchestrator.runs.training import train as train_run

    verdicts = RunningVerdicts(request.out, console.aside)
    console.start(request.spec.name, request.spec.schedule.steps, verdicts)
    try:
        ended = train_run(request, console)
        console.finish(ended.summary(request.out), hurried=ended.interrupted)
    except (KeyboardInterrupt, StopRequested):
        raise
    except BaseException:
        console.fail()
        raise
    finally:
        console.close()
    return ended


def evaluate(
    spec: SpecLike,
    model: PathLike | None = None,
    *,
    set: Overrides = (),
    best: bool = False,
    output: PathLike | None = None,
    address: str | None = None,
    progress: bool | TextIO = False,
) -> dict[str, float]:
    """Evaluate a model on the held-out data of a spec; returns the metrics.

    Args:
        spec: The spec.
        model: Folder of a model, of a checkpoint or of a run (its newest checkpoint), or a name on the hub, or None for
            the spec's model.
        set: Fields to set.
        best: The checkpoint of a run's best evaluation (`checkpoint.best`).
        output: JSON file for the results with their confidence intervals (prompts only).
        address: Ray cluster to join, or None to start a local one.
        progress: Print what is being done to standard output, or to this stream.

    Raises:
        SpecError: The spec, or what it names, is not valid.
        UsageError: The spec names no held-out data, or has stages; `set` is not valid, there is no such example, or the
            model is none of these.
        OSError: A run or a checkpoint has no model.
    """
    from troupe.orchestrator.runs.evaluation import EvaluationOptions, evaluate_offline, evaluate_on_prompts
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.training.export import has_adapters

    if best and model is None:
        raise UsageError("--best needs the folder of a run as the model")
    stream, planned, adapter = _stream(progress), _planned(spec, set), None
    if model is not None:
        path = evaluated_model(model, best=best)
        adapter = path if planned.spec.rollouts is not None and has_adapters(path) else None
        merged = ["model.adapter=null", *template_overrides(planned.spec, path)]
        named = merged if adapter else model_overrides(planned.spec, path)
        planned = _planned(spec, [*_assignments(set), *named])
    planned = _in_place(planned, stream)
    request, console = RunRequest(planned.spec, planned.out, False, address), _console(None, stream)
    if planned.spec.rollouts is not None:
        file = None if output is None else local_path(output)
        running = evaluate_on_prompts(request, console, EvaluationOptions(file, adapter))
    elif output is not None:
        raise UsageError("--output is for specs with rollouts: this one trains on offline data")
    else:
        running = evaluate_offline(request, console)
    return _outside_of_loops(lambda: asyncio.run(running), request)


def evaluated_model(model: PathLike, *, best: bool = False) -> Path:
    """The folder, or the name on the hub, of a model or adapters that are named directly, by a checkpoint or by a run.

    Args:
        model: The name.
        best: The checkpoint of a run's best evaluation.

    Raises:
        UsageError: It is a URL, or no run is named and the best checkpoint is asked for.
        OSError: The run or the checkpoint has no model.
    """
    from troupe.orchestrator.training.checkpoint import MODEL

    if is_url(os.fspath(model)):
        raise UsageError("--model: expected a folder, or a name on the hub; no model behind a URL is evaluated")
    folder = local_path(model)
    if (folder / "checkpoints").is_dir():
        folder = model_of(folder, best=best)
    elif best:
        raise UsageError(f"--best needs the folder of a run; {model} has no checkpoints")
    elif not (folder / "config.json").is_file() and (folder / MODEL).is_dir():
        folder = folder / MODEL
    return folder


def plan(spec: SpecLike, *, set: Overrides = (), cluster: str | None = None) -> Plan:
    """Placement and memory of every worker; `misfit` names what does not fit.

    Args:
        spec: The spec.
        set: Fields to set.
        cluster: NODESxGPUS[xTYPE], as in `2x8xH200`, or None for this machine.

    Raises:
        SpecError: The spec is not valid.
        UsageError: `set` or `cluster` is not valid, there is no such example, or the file has stages.
    """
    planned = with_configs(_planned(spec, set))
    from troupe.orchestrator.plan.placement import CPUS_PER_NODE
    from troupe.orchestrator.plan.plan import described_nodes, plan_stages

    nodes = None if cluster is None else described_nodes(cluster, CPUS_PER_NODE)
    ((_, found),) = plan_stages([planned], nodes, advise=True)
    return found


def export(
    run: Outcome | PathLike,
    folder: PathLike,
    *,
    step: int | None = None,
    best: bool = False,
    average: bool = False,
    merge: bool = False,
) -> Path:
    """Write the policy of a run as a Hugging Face model folder, and return the folder.

    If the run trained adapters (`roles.policy.lora`), that is peft's folder of an adapter.

    Args:
        run: The run, or its folder.
        folder: The folder to write; it must not exist.
        step: Step of the checkpoint, or None for the newest valid one.
        best: The checkpoint of the best evaluation (`checkpoint.best`) instead.
        average: The moving average of the weights (`ema_decay`) instead of the weights.
        merge: Add the adapters to the model below them, in float32 before rounding once, and write the whole model.

    Raises:
        OSError: There is no such checkpoint, the folder exists or cannot be written, or the model below the adapters
            has changed.
        UsageError: There are no adapters to merge, or `folder` is a URL.
    """
    return export_checkpoint(run, folder, step=step, best=best, average=average, merge=merge)[1]


def export_checkpoint(
    run: Outcome | PathLike, folder: PathLike, *, step: int | None, best: bool, average: bool, merge: bool
) -> tuple[str, Path]:
    """Name of the exported checkpoint, and the folder; see `export`."""
    if is_url(os.fspath(folder)):
        raise UsageError(f"{folder} is a URL; write the model to a disk")
    from troupe.orchestrator.training.export import has_adapters, require_new, write_merged, write_model

    target = local_path(folder)
    require_new(target)  # first: a checkpoint takes minutes to verify
    source = model_of(run, step=step, best=best, average=average)
    if merge and not has_adapters(source):
        raise UsageError(f"{source} is a whole model: there are no adapters to merge")
    return source.parent.name, (write_merged if merge else write_model)(source, target)


def model_of(run: Outcome | PathLike, *, step: int | None = None, best: bool = False, average: bool = False) -> Path:
    """Folder of the model in a checkpoint of a run; see `export`. Raises OSError without a valid checkpoint."""
    from troupe.orchestrator.runs.checkpoints import best_step
    from troupe.orchestrator.training.checkpoint import AVERAGE, MODEL
    from troupe.orchestrator.training.export import exported_model

    checkpoints = _folder(run) / "checkpoints"
    if best and step is not None:
        raise UsageError("name a step or the best one, not both")
    return exported_model(checkpoints, best_step(checkpoints) if best else step, AVERAGE if average else MODEL)


def samples(
    run: Outcome | PathLike,
    *,
    step: int | None = None,
    where: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The samples of a run as an Arrow table (`.to_pandas()`; duckdb queries it by its name).

    Args:
        run: The run, or its folder.
        step: Only samples of this step.
        where: An SQL condition, as in `reward < 0 AND step > 40`.
        sort: Columns, separated by commas; descending with a leading `-`.
        limit: Most samples, or None for all.
        columns: Columns of the table, or None for all.

    Raises:
        UsageError: The run has no samples, the query is not valid, or duckdb is not installed.
    """
    if problem := missing_package("duckdb"):
        raise UsageError(f"samples: {problem}")
    from troupe.orchestrator.insight.samples import SampleQuery, select_samples
    from troupe.orchestrator.telemetry.run_folder import RunFolder
    from troupe.workers.contract.samples import SAMPLES

    query = SampleQuery(step, None, where, sort, limit)
    return select_samples(RunFolder(_folder(run)), query, columns or SAMPLES.names)


@dataclass(frozen=True, init=False)
class Outcome:
    """A run that has ended, or the run in a folder: `troupe.Outcome("runs/my-run")`."""

    folder: Path

    def __init__(self, folder: PathLike) -> None:
        object.__setattr__(self, "folder", local_path(folder))

    @property
    def state(self) -> RunState:
        """Whether the run is active, or how it has ended."""
        from troupe.orchestrator.live.run_state import run_state

        return run_state(self._run)

    @property
    def stopped(self) -> bool:
        """Whether a request has stopped it before its last step."""
        return self.state.name == "stopped"

    @property
    def metrics(self) -> pa.Table:
        """One row for each step, step 0 being the evaluation at the start; a metric that a step lacks is null."""
        import pyarrow as pa

        rows = self._run.metrics()
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    @property
    def steps(self) -> int:
        """Steps with metrics."""
        return max(self._run.steps(), default=0)

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the newest valid checkpoint; None without one."""
        from troupe.orchestrator.training.checkpoint import CheckpointStore

        found = CheckpointStore(self.folder / "checkpoints", keep=1).latest()
        return None if found is None else found.path

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The findings on the run."""
        from troupe.orchestrator.insight.verdicts.apply import report_of

        return report_of(self._run).verdicts

    def report(self, file: PathLike | None = None) -> Path:
        """Write the report, one HTML page, and return the file.

        Args:
            file: The file, or None for `report.html` in the run folder.
        """
        from troupe.orchestrator.insight.report.report import REPORT, write_report

        return write_report([self.folder], self.folder / REPORT if file is None else local_path(file))

    @cached_property
    def _run(self) -> RunFolder:
        from troupe.orchestrator.telemetry.run_folder import RunFolder

        return RunFolder(self.folder)


def local_path(path: PathLike) -> Path:
    """A path with the user's home folder in place of `~`."""
    return Path(os.path.expanduser(path))  # that of pathlib raises for an unknown user


def _planned(source: SpecLike, overrides: Overrides, out: Path | None = None) -> PlannedRun:
    """The run of a spec. Raises SpecError or UsageError."""
    name = "the spec" if isinstance(source, RunSpec | Mapping) else os.fspath(source)
    return single(_document(source, _assignments(overrides)), name, lambda line: None, out)


def _document(source: SpecLike, assignments: list[str]) -> yaml_reader.Document:
    if not isinstance(source, RunSpec | Mapping):
        return read_document(os.fspath(source), assignments)
    data = dict(source) if isinstance(source, Mapping) else source.model_dump(mode="json", exclude_defaults=True)
    return yaml_reader.override(yaml_reader.Document(data, Source("spec")), assignments)


def _assignments(overrides: Overrides) -> list[str]:
    """The overrides as `field.path=value`, the value as YAML."""
    if isinstance(overrides, str):
        raise UsageError(f"set: expected a list of FIELD=VALUE or a dict, got {overrides!r}")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{name}={_as_yaml(name, value)}" for name, value in overrides.items()]


def _as_yaml(name: str, value: Any) -> str:
    """A value as JSON, which is YAML; numbers of numpy and paths too. Raises UsageError for another object."""

    def plain(other: Any) -> Any:
        import numpy as np

        if isinstance(other, Path):
            return str(other)
        if isinstance(other, np.generic | np.ndarray):
            return other.tolist()
        raise UsageError(f"set: {name}: expected numbers, text, lists and dicts, got {type(other).__name__}")

    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(float(value))]  # as YAML writes them
    return json.dumps(value, default=plain)


def _in_place(planned: PlannedRun, stream: TextIO, *, resume: bool = False) -> PlannedRun:
    """The run, with the models of the examples created and names on the hub pinned. Raises SpecError."""
    create_models([planned], lambda line: stream.write(f"{line}\n"))
    return checked((planned,), resume=resume)[0]


def _stream(progress: bool | TextIO) -> TextIO:
    if isinstance(progress, bool):
        return sys.stdout if progress else io.StringIO()
    return progress


def _folder(run: Outcome | PathLike) -> Path:
    return run.folder if isinstance(run, Outcome) else local_path(run)


def _console(on_step: OnStep | None, stream: TextIO) -> Console:
    """The console of a run, which also calls the user's function after each step."""
    from troupe.orchestrator.telemetry.console import Console

    class StepConsole(Console):
        def step(self, step: int, metrics: Mapping[str, object]) -> None:
            super().step(step, metrics)
            if on_step is not None:
                on_step(step, dict(metrics))

        def evaluation(self, step: int, metrics: Mapping[str, object]) -> None:
            if on_step is not None and step:
                on_step(step, dict(metrics))

    return StepConsole(stream)


def _wait(done: threading.Event) -> None:
    """Waits, and heeds signals meanwhile: one that another thread of the process receives interrupts no wait."""
    while not done.wait(SIGNALS_S):
        pass


_THREADS = ThreadPoolExecutor(thread_name_prefix="troupe-run")
"""An idle thread is used again: Ray numbers a driver's objects by thread, from 1 on in a new one. What an interrupted
run has left, such as the frames of an exception that a notebook keeps, would free objects of the next run."""


def _outside_of_loops(start: Callable[[], T], request: RunRequest) -> T:
    """Calls a function that runs an event loop, in another thread if this one has a loop. An interrupt stops the run
    in order, and is raised when it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return start()
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(start())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    try:
        _THREADS.submit(work)
        _wait(done)
    except KeyboardInterrupt:
        request.switch.stop()
        _wait(done)
        raise
    if errors:
        raise errors[0]
    return results[0]

"""The destinations of metrics: files, trackers in their offline modes, and the endpoint for Prometheus."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any, get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from troupe.orchestrator.spec.checks.machine import missing
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.sections import BaseOutput, PrometheusConfig
from troupe.orchestrator.telemetry import sinks
from troupe.orchestrator.telemetry.event_log import Ended
from troupe.orchestrator.telemetry.json_lines import JsonLinesFile
from troupe.orchestrator.telemetry.metrics import metric_named
from troupe.orchestrator.telemetry.sinks import (
    BackgroundSink,
    LoggedRun,
    Metrics,
    MetricSinks,
    MlflowSink,
    PrometheusSink,
    TensorBoardSink,
    flat_config,
    mlflow_name,
    prometheus_name,
)

OUTPUT = BaseOutput(sinks=("tensorboard",))
CONFIG = {"name": "r", "roles": {"policy": {"workers": 2}}, "empty": {}}


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonLinesFile(path, -1)
    sink.write(1, {"kind": "train", "reward": 0.5, "loss": math.nan, "grad_norm": -math.inf, "steps": 3})
    [line] = lines(path)
    assert line.pop("time") > 1e9
    assert line == {"step": 1, "kind": "train", "reward": 0.5, "loss": None, "grad_norm": None, "steps": 3}
    sink.close()


def test_resume_drops_later_and_truncated_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesFile(path, -1)
    for step in (0, 1, 2, 2, 3):
        sink.write(step, {"reward": float(step)})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    resumed = JsonLinesFile(path, 2)
    resumed.write(3, {"reward": 33.0})
    resumed.close()
    assert [(line["step"], line["reward"]) for line in lines(path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (2, 2.0),
        (3, 33.0),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("replaced", ["renamed over", "moved away", "cut", "removed"])
def test_lines_follow_the_file_that_is_at_the_path_and_cut_none_of_it(tmp_path: Path, replaced: str) -> None:
    """An editor or rsync renames a new file over it, or moves the old one away; then the disk is full."""
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    sink = JsonLinesFile(path, -1)
    for step in (0, 1):
        sink.write(step, {})
    other.write_text('{"step": 0}\n{"step": 9}')
    if replaced == "renamed over":
        other.rename(path)
    elif replaced == "moved away":
        path.rename(tmp_path / "metrics.jsonl~")
        other.rename(path)
    elif replaced == "cut":
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    else:
        path.unlink()
    kept = {"renamed over": [0, 9], "moved away": [0, 9], "cut": [0], "removed": []}[replaced]
    sink.write(2, {})
    assert [line["step"] for line in lines(path)] == [*kept, 2]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        sink.write(3, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["step"] for line in lines(path)] == [*kept, 2]
    sink.write(4, {})
    sink.close()
    assert [line["step"] for line in lines(path)] == [*kept, 2, 3, 4]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    for reward in (1.0, 2.0):
        sinks = MetricSinks.open(LoggedRun(tmp_path))
        sinks.write(0, {"reward": reward})
        sinks.close()
    assert [line["reward"] for line in lines(tmp_path / "metrics.jsonl")] == [2.0]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def test_tensorboard_reads_the_scalars_and_resume_hides_later_steps(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path, -1)
    for step in (1, 2, 3):
        first.write(step, {"reward/mean": step / 4, "kind": "train"})
    first.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    resumed = TensorBoardSink(tmp_path, 2)
    resumed.write(3, {"reward/mean": 9.0})
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 9.0)]


def test_sinks_write_everywhere(tmp_path: Path) -> None:
    sinks = MetricSinks.open(LoggedRun(tmp_path), OUTPUT)
    sinks.write(1, {"kind": "eval", "eval/accuracy": 0.5})
    sinks.close()
    assert lines(tmp_path / "metrics.jsonl")[0]["eval/accuracy"] == 0.5
    assert scalars(tmp_path / "tensorboard", "eval/accuracy") == [(1, 0.5)]


def test_metrics_and_events_need_neither_torch_nor_ray_nor_tensorflow(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from troupe.orchestrator.telemetry.sinks import MetricSinks, LoggedRun; "
        "from troupe.orchestrator.spec.sections import BaseOutput; early = 'tensorboard' in sys.modules; "
        f"run = LoggedRun(pathlib.Path({str(tmp_path)!r})); "
        "MetricSinks.open(run, BaseOutput(sinks=('tensorboard',))).write(1, {'a': 1.0}); "
        "print(early, [name for name in ('torch', 'ray', 'tensorflow', 'tensorboard') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False ['tensorboard']"


class Slow:
    """A tracker whose server answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.written: list[int] = []
        self.closed = ""

    def write(self, step: int, metrics: Metrics) -> None:
        self.answers.wait()
        self.written.append(step)

    def close(self, how: str) -> None:
        self.closed = how


def test_a_tracker_that_does_not_answer_delays_neither_a_step_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 0.1)
    slow = Slow()
    sink = BackgroundSink("slow", lambda: slow)
    for step in range(3):
        sink.write(step, {"a": 1.0})  # returns at once
    assert slow.written == []
    sink.close("stopped")
    assert "slow does not answer" in caplog.text
    slow.answers.set()
    sink._thread.join(5.0)
    assert slow.written == [0, 1, 2] and slow.closed == "stopped"


def test_a_tracker_that_fails_is_one_warning_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Slow:
        raise PermissionError("api_key not configured\nmore")

    sink = BackgroundSink("wandb", refuse)
    sink.write(1, {"a": 1.0})
    sink.close()
    assert caplog.messages == [
        "wandb records no further metrics: api_key not configured",
        "wandb: the metrics of 1 steps are missing there",
    ]


def test_steps_after_a_tracker_has_failed_are_counted_and_the_end_does_not_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 1000.0)

    def fails() -> Slow:
        raise RuntimeError("no server")

    sink = BackgroundSink("tracker", fails)
    sink._thread.join(10)
    for step in range(3):
        sink.write(step, {})
    sink.close()
    assert "tracker: the metrics of 3 steps are missing there" in caplog.messages


@pytest.mark.parametrize(
    ("name", "there"), [("eval/pass@2", "eval/pass_2"), ("reward/mean", "reward/mean"), ("a b-c.d:e", "a b-c.d:e")]
)
def test_mlflow_gets_names_that_it_allows(name: str, there: str) -> None:
    assert mlflow_name(name) == there


def test_prometheus_reads_the_metrics_of_the_latest_step() -> None:
    sink = PrometheusSink('run "1"', "127.0.0.1", 0)
    sink.write(1, {"reward/mean": 0.25, "eval/accuracy": 0.5, "kind": "train"})
    sink.write(2, {"reward/mean": math.nan, "grad_norm": math.inf})
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5.0) as answer:
        text = answer.read().decode()
    label = 'run="run \\"1\\""'
    assert f"troupe_reward_mean{{{label}}} NaN" in text
    assert f"troupe_eval_accuracy{{{label}}} 0.5" in text, "an evaluation keeps its last value"
    assert f"troupe_grad_norm{{{label}}} +Inf" in text and f"troupe_step{{{label}}} 2.0" in text
    assert "kind" not in text
    sink.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5.0)


def test_a_port_in_use_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first = PrometheusSink("a", "127.0.0.1", 0)
    second = PrometheusSink("b", "127.0.0.1", first.port)
    second.write(1, {"a": 1.0})
    second.close()
    first.close()
    assert f"cannot listen on 127.0.0.1:{first.port}" in caplog.text


def test_the_grafana_board_shows_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "troupe.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    shown = {target["legendFormat"].removeprefix("{{run}} "): target["expr"] for target in targets}
    assert len(shown) > 20
    assert all(f"{prometheus_name(name)}{{" in expression for name, expression in shown.items())
    own = {"step", "step_time_seconds"}
    assert [name for name in shown if metric_named(name) is None and name not in own] == []


def test_trackers_get_no_secrets_of_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LoggedRun] = []
    monkeypatch.setattr(MetricSinks, "open", lambda run, output: opened.append(run))
    spec = load_rollout_spec(
        ROOT / "deploy" / "specs" / "tiny-grpo.yaml", ["roles.reward.functions.0.args={api_key: word}"]
    )
    MetricSinks.of_spec(spec, tmp_path, 0)
    assert "word" not in str(opened[0].config) and "'api_key': '(hidden)'" in str(opened[0].config)


def test_a_nested_configuration_becomes_one_level() -> None:
    assert flat_config(CONFIG) == {"name": "r", "roles.policy.workers": "2", "empty": "{}"}
    assert flat_config({}) == {}


def test_sinks_of_a_spec_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    grpo = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
    spec = load_rollout_spec(grpo, ["output.sinks=[tensorboard, wandb]", "output.prometheus={port: 9000}"])
    assert spec.output.prometheus == PrometheusConfig(port=9000)
    assert list(missing(spec)) == [("output.sinks.1", "needs the package wandb: pip install 'troupe-rl[trackers]'")]
    with pytest.raises(SpecError, match=r"output\.sinks.*wandb"):
        load_rollout_spec(grpo, ["output.sinks=[wand]"])


def in_own_process(code: str, folder: Path, **env: str) -> str:
    """The output of code in a separate process, as a driver is: trackers keep threads and processes."""
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RECORD = """
import sys, pathlib
from troupe.orchestrator.telemetry.sinks import LoggedRun
from troupe.orchestrator.telemetry.sinks import MetricSinks
from troupe.orchestrator.spec.sections import BaseOutput
folder = pathlib.Path(sys.argv[1])
for resume_at, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    run = LoggedRun(folder, "r", resume_at, "p", {"name": "r", "roles": {"policy": {"workers": 2}}})
    sinks = MetricSinks.open(run, BaseOutput(sinks=("NAME",)))
    for step in steps:
        sinks.write(step, {"reward/mean": step / 4, "loss": float("nan"), "kind": "train"})
    sinks.close()
"""


def test_wandb_offline_has_one_run_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    in_own_process(RECORD.replace("NAME", "wandb"), tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    parts = sorted(tmp_path.glob("wandb/offline-run-*"))
    identity = (tmp_path / "wandb-id").read_text().strip()
    assert len(parts) == 2 and all(part.name.endswith(identity) for part in parts)
    recorded = [b"".join(file.read_bytes() for file in part.glob("*.wandb")) for part in parts]
    assert all(b"reward/mean" in content for content in recorded) and b"0.75" in recorded[0]


def test_trackio_has_one_run_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    in_own_process(RECORD.replace("NAME", "trackio"), tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "p.db")) as found:
        rows = found.execute("select run_name, step, metrics from metrics order by id").fetchall()
    name = f"r-{(tmp_path / 'trackio-id').read_text().strip()}"
    assert [(row[0], row[1], json.loads(row[2])["reward/mean"]) for row in rows] == [
        (name, step, step / 4) for step in (1, 2, 3, 3, 4)
    ]


def test_swanlab_offline_has_one_run_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    in_own_process(RECORD.replace("NAME", "swanlab"), tmp_path, SWANLAB_MODE="offline")
    identity = (tmp_path / "swanlab-id").read_text().strip()
    parts = sorted(tmp_path.glob(f"swanlog/run-*-{identity}/run-{identity}.swanlab"))
    assert len(parts) == 2 and all(b"reward/mean" in part.read_bytes() for part in parts)


def test_mlflow_without_a_server_has_one_run_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    in_own_process(RECORD.replace("NAME", "mlflow"), tmp_path, MLFLOW_DISABLE_TELEMETRY="true")
    sink = MlflowSink(LoggedRun(tmp_path, "r", 4, "p"))
    history = sink._client.get_metric_history(sink._id, "reward/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
    assert sink._client.get_run(sink._id).data.params["roles.policy.workers"] == "2"
    for how, status in zip(get_args(Ended), ("FINISHED", "KILLED", "FAILED"), strict=True):
        sink.close(how)
        assert sink._client.get_run(sink._id).info.status == status


def test_a_tracker_is_told_how_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb shows exit code 255 as killed; swanlab's states are in its `FinishType`."""
    told: list[dict[str, Any]] = []

    class Module:
        def init(self, **_: Any) -> Module:
            return self

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def finish(self, **how: Any) -> None:
            told.append(how)

    for name in ("wandb", "swanlab", "trackio"):
        monkeypatch.setitem(sys.modules, name, Module())
        for how in get_args(Ended):
            MetricSinks.open(LoggedRun(tmp_path), BaseOutput(sinks=(name,))).close(how)
    assert told[:3] == [{"exit_code": code} for code in (0, 255, 1)]
    assert told[3:] == [*({"state": state} for state in ("success", "aborted", "crashed")), {}, {}, {}]

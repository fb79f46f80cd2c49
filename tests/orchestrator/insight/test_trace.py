"""The trace file of a run."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from troupe.orchestrator.cli import app
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.trace import step_windows, trace_events
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.telemetry.timeline import DRIVER, Span, timeline_table

T0 = 1_700_000_000.0


def span(worker: str, method: str, start: float, end: float, status: str = "ok", detail: str = "") -> Span:
    return Span(worker, method, T0 + start, T0 + end, status, detail)


def timeline() -> pa.Table:
    """Two steps of a synchronous run: two engines generate for 4 s, then two ranks train for 2 s."""
    tables = [timeline_table(0, [span("rollout-0", "start", -5.0, -1.0)])]
    for step, start in ((1, 0.0), (2, 7.0)):
        spans = [
            span("rollout-0", "generate", start, start + 3.0, detail="p0"),
            span("rollout-0", "generate", start + 1.0, start + 4.0, detail="p1"),
            span("rollout-1", "generate", start, start + 2.0, "WorkerDied" if step == 2 else "ok"),
            span(DRIVER, "generate", start, start + 4.0),
            *(span(f"policy-{rank}", "update", start + 4.0, start + 6.0) for rank in (0, 1)),
            span(DRIVER, "update", start + 4.0, start + 6.0),
            span("rollout-0", "update_weights", start + 6.0, start + 6.5, detail=f"version {step}"),
            span(DRIVER, "sync", start + 6.0, start + 7.0),
        ]
        tables.append(timeline_table(step, spans))
    return pa.concat_tables(tables)


def check_format(events: list[dict[str, Any]]) -> None:
    """Holds events to the Trace Event Format, as far as readers rely on it."""
    named: set[tuple[str, int, int]] = set()
    slices: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_: Counter[tuple[str, str, int]] = Counter()
    begun: dict[tuple[str, str, int], float] = {}
    for event in events:
        assert event["ph"] in "MXbe" and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], float) and event["ts"] >= 0 and event["cat"]
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] == "X":
            assert isinstance(event["dur"], float) and event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            continue
        key = event["cat"], event["id"], event["pid"]
        assert isinstance(event["id"], str)
        open_[key] += 1 if event["ph"] == "b" else -1
        if event["ph"] == "b":
            begun[key] = event["ts"]
        assert 0 <= open_[key] <= 1 and event["ts"] >= begun[key]
    assert not any(open_.values()), "an asynchronous slice does not end"
    for spans in slices.values():
        ordered = sorted(spans)
        for (_, end), (start, _) in itertools.pairwise(ordered):
            assert start >= end - 0.2, "complete slices of one thread overlap"


def test_the_trace_has_a_process_for_each_role_and_a_thread_for_each_worker() -> None:
    events = trace_events(timeline())
    check_format(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["steps", "driver", "rollout", "policy"]
    threads = {(processes[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {
        *(("driver", "driver-0"), ("rollout", "rollout-0"), ("rollout", "rollout-1")),
        *(("policy", "policy-0"), ("policy", "policy-1")),
    }
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "step"]
    assert steps == [("step 1", 5e6, 7e6), ("step 2", 12e6, 7e6)]


def test_only_calls_that_overlap_are_asynchronous() -> None:
    events = trace_events(timeline())
    kinds = Counter((event["ph"], event["name"]) for event in events if event["ph"] != "M")
    assert kinds["b", "generate"] == kinds["e", "generate"] == 4  # rollout-0
    assert kinds["X", "generate"] == 4  # rollout-1 and the driver
    assert kinds["X", "update"] == 6 and kinds["b", "update"] == 0
    failed = [event["args"] for event in events if event.get("args", {}).get("status")]
    assert failed == [{"step": 2, "worker": "rollout-1", "status": "WorkerDied"}]
    assert {event["args"]["detail"] for event in events if event["ph"] == "b"} == {"p0", "p1"}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_any_timeline_gives_a_valid_trace(calls: list[tuple[int, int, int]]) -> None:
    spans = [span(f"rollout-{worker}", "generate", start, start + length) for worker, start, length in calls]
    events = trace_events(timeline_table(1, spans))
    check_format(events)
    assert sum(event["ph"] in "Xb" for event in events) == len(calls)


def later(table: pa.Table, seconds: float) -> pa.Table:
    """The spans, so many seconds later."""
    rows = [row | {"start": row["start"] + seconds, "end": row["end"] + seconds} for row in table.to_pylist()]
    return pa.Table.from_pylist(rows, schema=table.schema)


def of_step(table: pa.Table, step: int) -> pa.Table:
    return table.filter(pc.field("step") == step)


def test_a_steps_window_is_that_of_its_phases() -> None:
    saved = timeline_table(2, [span(DRIVER, "checkpoint", 7.0, 7.5)])
    windows = step_windows(pa.concat_tables([timeline(), saved]))
    assert {step: (start - T0, end - T0) for step, (start, end) in windows.items()} == {1: (0.0, 7.0), 2: (7.0, 14.0)}
    assert step_windows(saved) == {}


def test_the_hours_before_a_run_was_resumed_belong_to_no_step() -> None:
    table = timeline()
    windows = step_windows(pa.concat_tables([of_step(table, 1), later(of_step(table, 2), 3600.0)]))
    assert {step: end - start for step, (start, end) in windows.items()} == {1: 7.0, 2: 7.0}


def write_run(folder: Path) -> None:
    """A run folder with the timeline."""
    (folder / "spec.yaml").write_text("name: tiny\n")
    (folder / "timeline").mkdir()
    for step in (0, 1, 2):
        pq.write_table(of_step(timeline(), step), folder / "timeline" / f"step-{step:06d}.parquet")


def test_only_files_of_the_steps_are_read(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = RunFolder(tmp_path)
    for steps, expected in (((1, 1), {1}), ((None, 1), {0, 1}), ((2, None), {2}), ((None, None), {0, 1, 2})):
        assert set(run.timeline_of(*steps)["step"].to_pylist()) == expected
    (tmp_path / "timeline" / "step-000002.parquet").write_bytes(b"PAR1 not a file")
    result = CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(tmp_path / "trace.json"), "--steps", "1"])
    assert result.exit_code == 0, result.output


def test_the_command_writes_the_file_and_says_what_it_holds(tmp_path: Path) -> None:
    write_run(tmp_path)
    runner, out = CliRunner(), tmp_path / "out" / "trace.json"
    result = runner.invoke(app, ["trace", str(tmp_path), "-o", str(out), "--steps", "1:"])
    assert result.exit_code == 0, result.output
    check_format(json.loads(out.read_text())["traceEvents"])
    data = json.loads(runner.invoke(app, ["trace", str(tmp_path), "--steps", "1", "--json"]).stdout)
    assert data == {"file": str(tmp_path / "trace.json"), "calls": 9}, "of this step alone, in the run folder"
    for steps, problem in (
        ("x", "no range"),
        ("5:3", "ends before"),
        ("7", "there are steps 0 to 2"),
        ("", "no range"),
    ):
        result = runner.invoke(app, ["trace", str(tmp_path), "-o", str(out), "--steps", steps])
        assert isinstance(result.exception, UsageError) and problem in str(result.exception), steps

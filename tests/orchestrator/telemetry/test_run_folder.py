"""Reading the records of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.telemetry.timeline import PHASES, TIMELINE, Span, phase_of, timeline_table
from troupe.workers.contract.samples import SAMPLES, conform


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text("name: tiny\nseed: 3\n")
    lines = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward/mean": None}, {"step": 2, "reward/mean": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3, "rew')
    return tmp_path


def test_a_folder_that_is_no_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        RunFolder(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"no spec\.yaml"):
        RunFolder(tmp_path)


def test_spec_and_metrics_are_read_and_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    run = RunFolder(folder)
    assert run.name == "tiny" and run.spec["seed"] == 3
    assert run.steps() == [0, 1, 2]
    assert run.metrics()[1] == {"step": 1, "reward/mean": None}
    assert run.events() == []


def test_an_evaluation_that_ended_later_is_in_the_line_of_its_step(folder: Path) -> None:
    """Whichever lines are behind it; that of the model before training comes first."""
    lines = [
        {"step": 1, "time": 10.0, "reward/mean": 0.1},
        {"step": 0, "time": 11.0, "eval/accuracy": 0.2},
        {"step": 2, "time": 12.0, "reward/mean": 0.3, "eval/accuracy": None},
        {"step": 3, "time": 13.0, "reward/mean": 0.4},
        {"step": 2, "time": 14.0, "eval/accuracy": 0.5},
        {"step": 2, "time": 15.0, "eval/accuracy": 0.6},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = RunFolder(folder)
    assert run.metrics() == [lines[1], lines[0], lines[2] | {"eval/accuracy": 0.6}, lines[3]]
    assert run.steps() == [0, 1, 2, 3]


def test_lines_of_evaluations_alone_are_steps(folder: Path) -> None:
    """As in a run whose steps have no other metrics, and where a step was done again."""
    lines = [{"step": step, "eval/accuracy": step / 8} for step in (0, 2, 4)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert RunFolder(folder).metrics() == lines


def test_events_can_be_chosen_by_kind(folder: Path) -> None:
    lines = [{"step": 0, "event": "run_started"}, {"step": 1, "event": "weights", "version": 1}]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [event["event"] for event in RunFolder(folder).events()] == ["run_started", "weights"]
    assert RunFolder(folder).events("weights") == [lines[1]]


def write_samples(folder: Path, step: int, table: pa.Table) -> None:
    (folder / "trajectories").mkdir(exist_ok=True)
    pq.write_table(table, folder / "trajectories" / f"step-{step:06d}.parquet")


def test_samples_of_an_earlier_version_have_null_where_their_file_has_no_column(folder: Path) -> None:
    write_samples(folder, 7, pa.table({"prompt_uid": ["p0", "p1"], "reward": [1.0, None], "foreign": [1, 2]}))
    run = RunFolder(folder)
    table = run.samples(7)
    assert table.column_names == SAMPLES.names
    assert table["step"].to_pylist() == [7, 7] and table["reward"].to_pylist() == [1.0, None]
    assert table["trained"].to_pylist() == table["advantages"].to_pylist() == [None, None]
    assert run.samples(7, ["reward", "entropy"]).column_names == ["reward", "entropy"]
    assert run.samples(7, ["entropy"]).num_rows == 2
    with pytest.raises(UsageError, match=r"no samples of step 8 \(there are 1 of steps 7 to 7\)"):
        run.samples(8)


def test_a_damaged_file_is_named(folder: Path) -> None:
    write_samples(folder, 1, pa.table({"prompt_uid": ["p0"]}))
    (folder / "trajectories" / "step-000001.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(DataError, match=r"step-000001\.parquet cannot be read"):
        RunFolder(folder).samples(1)


def test_the_timeline_joins_its_steps(folder: Path) -> None:
    (folder / "timeline").mkdir()
    for step in (1, 2):
        spans = [
            Span("rollout-0", "generate", step, step + 0.5, "ok", "p0"),
            Span("driver-0", "sync", 3.0, 4.0, "ok", ""),
        ]
        pq.write_table(timeline_table(step, spans), folder / "timeline" / f"step-{step:06d}.parquet")
    run = RunFolder(folder)
    assert run.timeline().schema == TIMELINE
    assert run.timeline()["step"].to_pylist() == [1, 1, 2, 2]
    assert run.timeline(2).to_pylist()[0] == {
        "step": 2,
        "role": "rollout",
        "worker": "rollout-0",
        "phase": "generate",
        "method": "generate",
        "start": 2.0,
        "end": 2.5,
        "status": "ok",
        "detail": "p0",
    }
    assert run.timeline(2).to_pylist()[1]["phase"] == "sync" and run.timeline(2).to_pylist()[1]["method"] == ""
    assert run.timeline(3).num_rows == 0


def test_every_call_has_a_phase() -> None:
    calls = [
        *(
            ("rollout-0", "generate"),
            ("reward-3", "score_groups"),
            ("policy-0", "publish_weights"),
            ("rollout-0", "start"),
        ),
        *(("rollout-0", "update_weights"), ("policy-1", "save"), ("driver-0", "update"), ("driver-0", "unheard of")),
        *(("cluster", "reserve"), ("node 10.0.0.1-2", "download_all"), ("reward-0", "write_trajectories")),
    ]
    phases = [phase_of(*call) for call in calls]
    assert phases == [
        *("generate", "score", "publish", "start", "load", "checkpoint", "update", "other", "start", "start", "other")
    ]
    assert set(phases) <= set(PHASES)
    assert [role_of(name) for name in ("rollout-12", "cluster", "driver-0")] == ["rollout", "cluster", "driver"]


def test_a_table_conforms_to_a_schema_with_constants_for_missing_columns() -> None:
    schema = pa.schema([pa.field("step", pa.int32(), nullable=False), pa.field("reward", pa.float64())])
    table = conform(pa.table({"reward": pa.array([1, 2], pa.int32())}), schema, step=4)
    assert table.to_pydict() == {"step": [4, 4], "reward": [1.0, 2.0]} and table.schema == schema

"""Samples of a run as examples for the next stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from troupe.orchestrator.data.ranked import write_ranked
from troupe.orchestrator.errors import DataError
from troupe.workers.contract.samples import SAMPLES

COLUMNS = ("prompt_uid", "messages", "response", "reward")


def run_with(folder: Path, *steps: Sequence[tuple[str, str, float | None]]) -> Path:
    (folder / "trajectories").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    schema = pa.schema([SAMPLES.field(name).with_nullable(True) for name in COLUMNS])
    for step, rows in enumerate(steps, start=1):
        table = [
            {"prompt_uid": uid, "messages": json.dumps([{"role": "user", "content": uid}]), "response": r, "reward": v}
            for uid, r, v in rows
        ]
        file = folder / "trajectories" / f"step-{step:06d}.parquet"
        pq.write_table(pa.Table.from_pylist(table, schema=schema), file)
    return folder


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def prompt(uid: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": uid}]


def test_answers_are_ranked_and_the_best_is_a_demonstration(tmp_path: Path) -> None:
    first = [("b", "low", 0.1), ("a", "high", 0.9), ("b", "high", 0.7), ("a", "low", 0.2), ("a", "failed", None)]
    second = [("a", "right", 1.0), ("a", "also right", 1.0), ("c", "nan", float("nan"))]
    run = run_with(tmp_path, first, second)
    write_ranked(run)
    assert rows(run / "ranked.jsonl") == [
        {"prompt": prompt("a"), "answers": ["high", "low"], "scores": [0.9, 0.2]},
        {"prompt": prompt("b"), "answers": ["high", "low"], "scores": [0.7, 0.1]},
    ], "not the group without a difference"
    assert [(row["prompt"], row["response"], row["reward"]) for row in rows(run / "best.jsonl")] == [
        (prompt("a"), "high", 0.9),
        (prompt("b"), "high", 0.7),
        (prompt("a"), "also right", 1.0),
    ]


def test_the_files_do_not_depend_on_which_sample_finished_first(tmp_path: Path) -> None:
    samples = [("a", "x", 0.5), ("a", "x", 0.8), ("b", "y", 0.1), ("b", "z", 0.3), ("a", "w", 0.6)]
    runs = [run_with(tmp_path / str(number), order) for number, order in enumerate((samples, samples[::-1]))]
    for run in runs:
        write_ranked(run)
    for name in ("ranked.jsonl", "best.jsonl"):
        assert (runs[0] / name).read_text() == (runs[1] / name).read_text()
    assert rows(runs[0] / "ranked.jsonl")[0]["scores"] == [0.8, 0.6], (
        "an equal answer counts once, with its best reward"
    )


def test_a_run_without_rewards_has_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sample has a reward"):
        write_ranked(run_with(tmp_path, [("a", "x", None)]))

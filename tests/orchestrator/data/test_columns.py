"""Columns inside structs, by dotted names, in every format that has structs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from troupe.orchestrator.data.prompts import PromptPool, load_pool
from troupe.orchestrator.data.readers import arrow_columns, find_column
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.sections import DataSource

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "split": {"name": "train"}},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
        "reward_model": None,
        "extra_info": {"index": 1, "split": {"name": "test"}},
    },
]
"""Rows in the layout of verl's preprocessing scripts."""

Writer = Callable[[Path, list[dict[str, Any]]], dict[str, Any]]


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "jsonl", "path": str(folder / "rows.jsonl")}


def as_json(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows, indent=1).encode()))
    return {"kind": "json", "path": str(folder / "rows.json.gz")}


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return {"kind": "parquet", "path": str(folder / "rows.parquet")}


def as_datasets(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "rows")
    return {"kind": "datasets", "path": str(folder / "rows")}


def on_a_hub(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "hub", "name": "acme/verl", "files": [as_parquet(folder, rows)["path"]]}


WRITERS = (as_jsonl, as_json, as_parquet, as_datasets, on_a_hub)


def load(given: dict[str, Any], **fields: Any) -> PromptPool:
    return load_pool(TypeAdapter(DataSource).validate_python(given | fields))


def metadata(pool: PromptPool) -> list[dict[str, Any]]:
    return [json.loads(text) for text in pool.table.column("metadata").to_pylist()]


@pytest.mark.parametrize("write", WRITERS)
def test_a_dotted_name_reads_into_structs(tmp_path: Path, write: Writer) -> None:
    names = ["extra_info.index", "extra_info.split.name", "data_source"]
    pool = load(write(tmp_path, VERL), answer="reward_model.ground_truth", metadata=names)
    assert pool.problems == ()
    assert pool.table.column("answer").to_pylist() == ["4", ""]  # a struct that is null has no answer
    assert [list(row) for row in metadata(pool)] == [names, names]
    assert [list(row.values()) for row in metadata(pool)] == [[0, "train", "openai/gsm8k"], [1, "test", "openai/gsm8k"]]


@pytest.mark.parametrize("write", WRITERS)
def test_a_column_of_exactly_this_name_wins(tmp_path: Path, write: Writer) -> None:
    row = {"prompt": "p", "a.b": "literal", "a": {"b": "inside", "c.d": "dotted inside"}}
    pool = load(write(tmp_path, [row]), answer="a.b", metadata=["a.c.d"])
    assert pool.table.column("answer").to_pylist() == ["literal"]
    assert metadata(pool) == [{"a.c.d": "dotted inside"}]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reward_model.ground_thruth", "did you mean 'reward_model.ground_truth'?"),
        ("ground_truth", "did you mean 'reward_model.ground_truth'?"),
        ("data_source.style", "did you mean 'data_source'?"),
    ],
)
def test_a_missing_name_is_refused_with_the_nearest_one(tmp_path: Path, write: Writer, name: str, hint: str) -> None:
    with pytest.raises(DataError) as refused:
        load(write(tmp_path, VERL), answer=name)
    message = str(refused.value)
    assert f": no column '{name}' (data.train.answer); columns there: " in message and message.endswith(f"({hint})")
    assert "reward_model.style, " in message or "reward_model.style;" in message or "reward_model.style (" in message


def test_a_row_without_the_field_is_a_bad_row(tmp_path: Path) -> None:
    rows = [VERL[0], VERL[0] | {"reward_model": {"style": "model"}}, VERL[0] | {"reward_model": "4"}]
    pool = load(as_jsonl(tmp_path, rows), answer="reward_model.ground_truth")
    assert pool.rows == 1
    words = "no column 'reward_model.ground_truth'"
    assert pool.problems == (f"rows.jsonl:2: {words}", f"rows.jsonl:3: {words}")


def test_a_list_inside_a_struct_holds_several_right_answers(tmp_path: Path) -> None:
    for write in WRITERS:
        (folder := tmp_path / write.__name__).mkdir()
        pool = load(
            write(folder, [{"prompt": "p", "answers": {"text": ["a", "b"], "start": [1, 2]}}]), answer="answers.text"
        )
        assert metadata(pool) == [{"right_answers": ["a", "b"]}]


def test_only_what_is_named_is_found() -> None:
    row = {"a": {"b": {"c": 1}}, "a.b": {"d": 2}, "e": None, "f": 3}
    assert [find_column(row, name) for name in ("a.b.c", "a.b.d", "e.g.h", "f")] == [1, 2, None, 3]
    for name in ("a.b.x", "f.g", "g", ".", "a."):
        with pytest.raises(KeyError):
            find_column(row, name)
    schema = pa.schema([("x", pa.struct([("y", pa.int64()), ("z", pa.struct([("w", pa.string())]))]))])
    assert arrow_columns(schema) == {"x": {"y": "", "z": {"w": ""}}}

"""Formats of data files besides plain JSON lines and Parquet, and columns inside structs by dotted names."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from troupe.orchestrator.data.bad_rows import BadRow
from troupe.orchestrator.data.conversations import read_messages
from troupe.orchestrator.data.examples import as_examples
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import load_pool
from troupe.orchestrator.data.readers import RawValues, arrow_columns, file_format, find_column, read_table
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.sources import DataSource, Examples, TableFile


def source(**fields: Any) -> DataSource:
    return TypeAdapter(DataSource).validate_python(fields)


def csv(folder: Path, content: str | bytes, **fields: Any) -> DataSource:
    path = folder / "rows.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return source(kind="csv", path=str(path), **fields)


def prompts(pool: Pool) -> list[str]:
    return [json.loads(text)[-1]["content"] for text in pool.table.column("messages").to_pylist()]


def test_csv_rows_become_prompts_with_values_as_text(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,level\r\n2 + 2,4,1\r\n"a, ""b""\nc",d,\r\n\r\nlast,é,3\r\n'
    pool = load_pool(csv(tmp_path, text, metadata=["level"]))
    assert prompts(pool) == ["2 + 2", 'a, "b"\nc', "last"]
    assert pool.table.column("answer").to_pylist() == ["4", "d", "é"]
    assert [json.loads(text) for text in pool.table.column("metadata").to_pylist()] == [
        {"level": "1"},
        {"level": ""},
        {"level": "3"},
    ]
    assert pool.table.column("origin").to_pylist() == ["rows.csv:2", "rows.csv:4", "rows.csv:6"]
    assert prompts(load_pool(csv(tmp_path, text, limit=2))) == ["2 + 2", 'a, "b"\nc']


def test_a_csv_row_of_another_length_is_a_bad_row(tmp_path: Path) -> None:
    pool = load_pool(csv(tmp_path, "prompt,answer\na,b,c\nd\ne,f\n"))
    assert prompts(pool) == ["e"]
    assert pool.problems == ("rows.csv:2: 3 values for 2 columns", "rows.csv:3: 1 values for 2 columns")


def test_a_csv_value_may_be_as_long_as_a_line_of_json(tmp_path: Path) -> None:
    assert prompts(load_pool(csv(tmp_path, f"prompt,answer,notes\na,b,{'x' * 200_000}\n"))) == ["a"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "question,answer\na,b\n",
            r"rows.csv: no column 'prompt' \(data.train.prompt\); columns there: question, answer",
        ),
        ("", "no column 'prompt'"),
        (b"prompt,answer\n\xff,b\n", "rows.csv: cannot be read"),
        ('prompt,answer\n"a,b\n', "rows.csv: cannot be read"),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_pool(csv(tmp_path, content))


def test_compressed_json_lines_are_read_and_damaged_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    data = gzip.compress(b'{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    path.write_bytes(data)
    assert prompts(load_pool(source(kind="jsonl", path=str(path)))) == ["a", "b"]
    for damaged in (data[:-12], b"not gzip"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"rows.jsonl.gz: cannot be read"):
            load_pool(source(kind="jsonl", path=str(path)))


def test_the_files_of_a_dataset_are_read_one_after_another_up_to_the_limit(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.csv")]
    pq.write_table(pa.table({"prompt": ["p0", "p1"], "answer": ["", ""]}), names[0])
    Path(names[1]).write_text('{"prompt": "j", "answer": ""}\n')
    Path(names[2]).write_text("prompt,answer\nc,\n")
    data = {"kind": "hub", "name": "acme/words", "files": names}
    assert prompts(load_pool(source(**data))) == ["p0", "p1", "j", "c"]
    assert prompts(load_pool(source(**data, limit=3))) == ["p0", "p1", "j"]


def json_rows(folder: Path, content: str | bytes, name: str = "rows.json") -> Pool:
    path = folder / name
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return load_pool(source(kind="json", path=str(path)))


@pytest.mark.parametrize(("kind", "name"), [("jsonl", "rows.jsonl"), ("jsonl", "rows.jsonl.gz"), ("json", "rows.json")])
def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path: Path, kind: str, name: str) -> None:
    data = '\ufeff{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "\ufeff2"}\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    pool = load_pool(source(kind=kind, path=str(tmp_path / name)))
    assert prompts(pool) == ["a", "b"] and not pool.problems
    assert pool.table.column("answer").to_pylist() == ["1", "\ufeff2"]


def test_an_integer_of_more_than_64_bits_is_read_in_an_array_as_in_lines(tmp_path: Path) -> None:
    large = 10**30 + 7
    rows = [{"prompt": str(n), "answer": large if n % 3 == 2 else n, "x": [0.5, 2**64, -(2**63)]} for n in range(9)]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    asked: dict[str, Any] = {"metadata": ["x"]}
    in_lines = load_pool(source(kind="jsonl", path=str(lines), **asked))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    in_array = load_pool(source(kind="json", path=str(tmp_path / "rows.json"), **asked))
    assert in_array.problems == in_lines.problems == ()
    for column in ("messages", "answer", "metadata"):
        assert in_array.table.column(column).to_pylist() == in_lines.table.column(column).to_pylist()
    assert in_array.table.column("answer").to_pylist()[2] == str(large)
    assert in_array.table.column("origin").to_pylist() == [f"rows.json:{n}" for n in range(1, 10)]


@pytest.mark.parametrize("broken", ["9" * 5000, "1e999"])
def test_a_number_that_no_parser_takes_is_an_error_of_the_file(tmp_path: Path, broken: str) -> None:
    with pytest.raises(DataError, match=r"rows\.json: cannot be read"):
        json_rows(tmp_path, f'[{{"prompt": "a", "answer": {2**70}}}, {{"prompt": "b", "answer": {broken}}}]')


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
def test_a_json_array_is_read_row_by_row(tmp_path: Path, name: str) -> None:
    rows: list[Any] = [{"prompt": "é", "answer": 0.5, "more": {"a": [1]}}, 7, {"prompt": "b", "answer": 3}]
    for text in (json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False), "\ufeff \n" + json.dumps(rows)):
        pool = json_rows(tmp_path, text, name)
        assert prompts(pool) == ["é", "b"]
        assert pool.table.column("answer").to_pylist() == ["0.5", "3"]
        assert pool.table.column("origin").to_pylist() == [f"{name}:1", f"{name}:3"]
        assert pool.problems == (f"{name}:2: not a JSON object",)


def test_json_lines_under_the_name_json_are_read_too(tmp_path: Path) -> None:
    assert prompts(json_rows(tmp_path, '{"prompt": "a", "answer": ""}\n{"prompt": "b", "answer": ""}\n')) == ["a", "b"]


@pytest.mark.parametrize(
    "content", ['[{"prompt": "a", "answer": ""},', '[{"prompt": "a" "b"}]', b'[{"prompt": "\xff"}]']
)
def test_a_damaged_json_array_is_named(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(DataError, match=r"rows\.json: cannot be read \(.+\); see data\.train\.path$"):
        json_rows(tmp_path, content)


def test_an_empty_json_file_has_no_rows(tmp_path: Path) -> None:
    for content in ("", "[]", " \n"):
        with pytest.raises(DataError, match=r"data\.train: there are no rows"):
            json_rows(tmp_path, content)


def test_the_memory_of_a_json_array_does_not_grow_with_the_file(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "p", "answer": "", "notes": "x" * 10_000})
    path = tmp_path / "rows.json"
    path.write_text(f"[{','.join([row] * 2_000)}]")
    rows = read_table(TableFile(kind="json", path=str(path)), {"prompt": "prompt"}, "data.train")
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows) == 2_000
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 10
    finally:
        tracemalloc.stop()


def test_a_type_that_arrow_would_unpickle_runs_nothing(tmp_path: Path) -> None:
    """Arrow used to unpickle a column's type; whether it does is decided for a whole process."""
    canary = tmp_path / "canary"

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {canary}",)

    kind = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Canary())}
    schema = pa.schema([pa.field("prompt", pa.string(), metadata=kind), pa.field("answer", pa.string())])
    table = pa.table({"prompt": ["a"], "answer": ["1"]}, schema=schema)
    pq.write_table(table, tmp_path / "rows.parquet")
    assert prompts(load_pool(source(kind="parquet", path=str(tmp_path / "rows.parquet")))) == ["a"]
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_table(table)
    folder = tmp_path / "folder"
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["1"]}).save_to_disk(str(folder))
    (data,) = folder.glob("*.arrow")
    data.unlink()
    (tmp_path / "rows.arrow").rename(data)
    assert prompts(load_pool(source(kind="datasets", path=str(folder)))) == ["a"]
    assert not canary.exists()
    pickle.loads(kind[b"ARROW:extension:metadata"])
    assert canary.exists(), "the test can fail"


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


def load(given: dict[str, Any], **fields: Any) -> Pool:
    return load_pool(TypeAdapter(DataSource).validate_python(given | fields))


def metadata(pool: Pool) -> list[dict[str, Any]]:
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


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


LINE = '{"prompt": "N\u00e9", "answer": "a;b"}'.encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'prompt;answer\nN\u00e9;"a;b"\n'.encode()),
        ("rows.csv", "prompt\tanswer\nN\u00e9\ta;b\n".encode("utf-16")),
        ("rows.csv.gz", gzip.compress("\ufeffprompt,answer\nN\u00e9,a;b\n".encode(), mtime=0)),
        ("rows.csv.zst", zstd("prompt,answer\nN\u00e9,a;b\n".encode())),
        ("rows.jsonl.zst", zstd(LINE)),
        ("rows.json.zst", zstd(b"[" + LINE + b"]")),
    ],
)
def test_separators_encodings_and_compressions_of_files(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    table = load_pool(source(kind=file_format(name), path=str(path))).table
    assert json.loads(table.column("messages")[0].as_py())[0]["content"] == "N\u00e9"
    assert table.column("answer").to_pylist() == ["a;b"]
    path.write_bytes(content[:-9])
    if path.suffix in (".gz", ".zst"):
        with pytest.raises(DataError, match=rf"{path.name}: cannot be read|no row can be used|there are no rows"):
            load_pool(source(kind=file_format(name), path=str(path)))


def test_other_encodings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.csv: cannot be read \(not UTF-8 text\)"):
        load_pool(csv(tmp_path, "prompt,answer\nN\u00e9,1\n".encode("latin-1")))


def test_maps_are_maps_and_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    kinds = pa.schema({"prompt": pa.string(), "answer": pa.string(), "m": pa.map_(pa.string(), pa.int64())})
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": "1", "m": [("x", 1)]}], schema=kinds), path)
    table = load_pool(source(kind="parquet", path=str(path), metadata=["m"])).table
    assert json.loads(table.column("metadata")[0].as_py()) == {"m": {"x": 1}}
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"], "m": [b"x"]}), path)
    with pytest.raises(DataError, match=r"the metadata cannot be held as JSON \(bytes are no text\)"):
        load_pool(source(kind="parquet", path=str(path), metadata=["m"]))


ASKED, SAID = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED | {"content": [{"type": "text", "text": "Q"}]}, SAID | {"content": [{"type": "text", "text": "A"}]}],
        [ASKED | {"name": "bob", "weight": 0}, SAID | {"weight": 1, "tool_calls": []}],
        [{"from": "human", "value": "Q", "weight": 0, "html": None}, {"from": "gpt", "value": "A", "weight": 1}],
        [{"input": "Q", "output": "A"}],
    ],
)
def test_messages_as_they_are_published(messages: list[Any]) -> None:
    assert read_messages(messages) == [ASKED, SAID]
    assert read_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


@pytest.mark.parametrize(
    "field",
    [{"thinking": "hm"}, {"audio": {"id": "1"}}, {"tool_call_id": "1"}],
)
def test_fields_of_messages_that_decide_what_is_trained_are_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=rf"message 1 has {next(iter(field))}, which is not read"):
        read_messages([ASKED, SAID | field])


ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
TALK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
def test_rows_in_an_object_around_them_are_read(tmp_path: Path, indent: int | None, name: str) -> None:
    content = json.dumps({"version": "1", "meta": {"x": [{"y": 1}]}, "tags": ["a"], "data": ROWS}, indent=indent)
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    pool = load_pool(source(kind="json", path=str(tmp_path / name)))
    assert pool.table.column("answer").to_pylist() == ["1", "2"] and pool.problems == ()


def test_several_lists_in_an_object_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"train": ROWS, "test": ROWS}))
    with pytest.raises(DataError, match="train and test are lists of rows: keep one of them; see"):
        load_pool(source(kind="json", path=str(path)))


@pytest.mark.parametrize(
    "lines",
    [
        [{"prompt": TALK[:1], "answer": "1", "tests": [{"x": 1}]}],
        [{"prompt": "a", "answer": "1", "tests": [{"x": 1}]}],
        [{"prompt": "a", "answer": "1", "tests": [{"x": 1}]}] * 2,
    ],
)
def test_an_object_with_a_list_is_a_row_of_json_lines_under_the_name_json(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "rows.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_pool(source(kind="json", path=str(path))).rows == len(lines)


ROWS_TO_CHOOSE = [
    {"prompt": "a", "answer": "1", "score": 3, "from": {"name": "x"}, "tags": ["u"]},
    {"prompt": "b", "answer": "22", "score": 1.5, "from": {"name": "y"}, "tags": []},
    {"prompt": "c", "answer": "3", "score": None, "from": {"name": "z"}, "tags": ["u", "v"]},
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("where", "used", "bad"),
    [
        ("score > 2", "a", 1),
        ("score is not None and score * 2 <= 3", "b", 0),
        ('row["from.name"] in ["x", "z"]', "ac", 0),
        ('row["from"]["name"] == "y"', "b", 0),
        ("len(answer) == 1 and not 'v' in tags", "a", 0),
        ("prompt == 'c' or 1 < score < 2", "bc", 0),
        ("answer == '22'", "b", 0),
    ],
)
def test_only_rows_that_meet_a_condition_are_used_and_others_are_counted(
    where: str, used: str, bad: int, write: Writer, tmp_path: Path
) -> None:
    rows = ROWS_TO_CHOOSE
    pool = load(write(tmp_path, rows), where=where)
    assert ("".join(prompts(pool)), pool.bad_rows) == (used, bad)
    assert pool.skipped == {"rows by where": len(rows) - len(used) - bad}


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("answer == 1", r"where cannot be evaluated: answer is '1', which is never 1; of numbers as text write float"),
        ("answer in [1, 2]", r"answer is '1', which is never 1; of numbers as text write float"),
        ("score == '3'", r"score is 3, which is never '3'"),
        ("answer > 1", r"answer is '1', which is never 1; of numbers as text write float"),
        ("score", r"where is 3, neither true nor false"),
        ("9**9**9 > score", r"where cannot be evaluated: a power that is too large"),
        ("f'{answer}' == '1'", r"cannot evaluate f'"),
        ("level > 2", r"no column 'level' \(data\.train\.where\)"),
    ],
)
def test_a_condition_that_means_nothing_for_the_rows_is_an_error(where: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS_TO_CHOOSE[0]) + "\n")
    with pytest.raises(DataError, match=why):
        load_pool(source(kind="jsonl", path=str(path), where=where))


@pytest.mark.parametrize("where", ["score >", "2 > 1", "x = 2", "", "x.upper() == 'A'"])
def test_a_condition_that_is_no_expression_over_columns_is_refused_with_the_spec(where: str) -> None:
    with pytest.raises(ValueError, match=r"no Python expression|names no column|calls x.upper; functions are abs,"):
        source(kind="jsonl", path="x", where=where)


def test_conditions_on_answers_in_rows_of_their_own_do_not_part_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [("p", "a", 1, 1), ("p", "b", 2, 0), ("p", "c", 3, 1), ("q", "d", 1, 1), ("q", "e", 2, 1)]
    named = ({"prompt": p, "answer": a, "score": s, "ok": ok} for p, a, s, ok in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in named))
    examples = Examples(answers="answer", scores="score", one_in_a_row=True, where="ok == 1")
    read = [RawValues(str(n), row) for n, row in enumerate(map(json.loads, path.read_text().splitlines()))]
    left = [replace(row, left_out=not row.values["ok"]) for row in read]
    joined = list(as_examples(examples, left))
    assert [row.values["answer"] for row in joined if not row.left_out] == [["a", "c"], ["d", "e"]]
    assert sum(row.left_out for row in joined) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.tsv", "prompt\tanswer, exact\na, b\t1\n"),
        ("rows.tsv.gz", "prompt\tanswer, exact\na, b\t1\n"),
        ("rows.csv", "prompt;answer, exact;x;y\na, b;1;2;3\n"),
    ],
)
def test_commas_in_the_names_of_columns_separate_nothing(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    pool = load_pool(source(kind=file_format(name), path=str(path), answer="answer, exact"))
    assert prompts(pool) == ["a, b"]
    assert pool.table.column("answer").to_pylist() == ["1"]

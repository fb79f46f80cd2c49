"""Data in an object store: files by name and by pattern, copied once, and every way in which that fails."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pyarrow import fs
from pydantic import TypeAdapter

from tests.s3_server import Faults, s3_server
from troupe.orchestrator.commands.runs import shown_copies
from troupe.orchestrator.data import remote
from troupe.orchestrator.data.prompts import load_pool
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.checks.machine import missing_data
from troupe.orchestrator.spec.sources import DataSource
from troupe.orchestrator.starter.tables import find_tables


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Callable[[Faults], None]]]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as (options, inject):
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        yield options, inject


@pytest.fixture
def store(server: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """URL of a new folder without its options, and what writes a file of rows there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files, bucket = fs.FileSystem.from_uri(
        f"s3://{tmp_path.name.replace('_', '-')}?{server[0]}&allow_bucket_creation=true"
    )
    files.create_dir(bucket)

    def write(name: str, *prompts: str) -> None:
        with files.open_output_stream(f"{bucket}/data/{name}") as out:
            out.write("".join(json.dumps({"prompt": one, "answer": "4"}) + "\n" for one in prompts).encode())

    yield f"s3://{bucket}/data/{{}}?{server[0]}", write
    server[1](Faults())


def prompts(url: str) -> list[str]:
    """The prompts that a run reads."""
    source = TypeAdapter[Any](DataSource).validate_python({"kind": "jsonl", "path": url})
    found = load_pool(source).table.column("messages").to_pylist()
    return [json.loads(one)[0]["content"] if isinstance(one, str) else one[0]["content"] for one in found]


def test_a_file_and_a_pattern_are_read_in_order_of_their_names(store: tuple[str, Any]) -> None:
    url, write = store
    write("train-1.jsonl", "c")
    write("train-0.jsonl", "a", "b")
    write("test.jsonl", "other")
    assert prompts(url.format("train-1.jsonl")) == ["c"]
    assert prompts(url.format("train-*.jsonl")) == ["a", "b", "c"]


def test_a_file_is_copied_once_and_again_if_it_has_changed(store: tuple[str, Any]) -> None:
    url, write = store
    write("train.jsonl", "a")
    (copy,) = remote.local_files(url.format("train.jsonl"))
    copy.write_text(copy.read_text().replace('"a"', '"kept"'))
    assert copy.stat().st_mode & 0o077 == 0
    assert prompts(url.format("train.jsonl")) == ["kept"]
    write("train.jsonl", "longer")
    assert prompts(url.format("train.jsonl")) == ["longer"]


def test_a_part_of_a_file_is_never_read(store: tuple[str, Any], server: tuple[str, Any], tmp_path: Path) -> None:
    url, write = store
    write("train.jsonl", *"abc" * 5000)
    server[1](Faults(cuts=100))
    with pytest.raises(DataError, match=r"s3://.*/data/train\.jsonl: "):
        prompts(url.format("train.jsonl"))
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    server[1](Faults())
    assert len(prompts(url.format("train.jsonl"))) == 15000


def test_a_copy_is_shown_as_it_arrives(store: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, write = store
    write("train.jsonl", *"abc" * 100)
    size = len(prompts_text := "".join(json.dumps({"prompt": one, "answer": "4"}) + "\n" for one in "abc" * 100))
    monkeypatch.setattr(remote, "_COPY_BYTES", len(prompts_text) // 2)
    shown: list[tuple[str, int, int]] = []
    with remote.copies_shown(lambda *arrived: shown.append(arrived)):
        prompts(url.format("train.jsonl"))
        prompts(url.format("train.jsonl"))
    assert shown == [("train.jsonl", size // 2, size), ("train.jsonl", size, size)]


@pytest.mark.parametrize("terminal", [True, False])
def test_init_shows_a_copy_in_a_terminal_only(
    terminal: bool, store: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, write = store
    write("train.jsonl", *"abc" * 100)
    monkeypatch.setattr(remote, "_COPY_BYTES", 1000)
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    with shown_copies():
        find_tables(url.format("train.jsonl"))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    if terminal:
        assert re.search(r"copying train\.jsonl +\d\S* ?/ ?\d\S* ", shown)
    else:
        assert shown == ""


@pytest.mark.parametrize(("name", "problem"), [("none.jsonl", "no such file"), ("none-*.jsonl", "no file matches")])
def test_a_url_without_a_file_is_named(name: str, problem: str, store: tuple[str, Any]) -> None:
    url, write = store
    write("train.jsonl", "a")
    with pytest.raises(DataError, match=problem) as raised:
        prompts(url.format(name))
    assert "endpoint_override" not in str(raised.value)


def test_init_reads_a_url_and_finds_the_held_out_part_beside_it(store: tuple[str, Any]) -> None:
    url, write = store
    write("train.jsonl", *"abc")
    table, held_out, why = find_tables(url.format("train.jsonl"))
    assert table.section == {"kind": "jsonl", "path": url.format("train.jsonl")} and len(table.rows) == 3
    assert held_out is None and why.startswith("no file beside train.jsonl is")
    write("test.jsonl", "d")
    _, held_out, _ = find_tables(url.format("train.jsonl"))
    assert held_out is not None and held_out.section["path"] == url.format("test.jsonl")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """URL of a web server, and the folder that it serves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (served := tmp_path / "site").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=served)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", served
        server.shutdown()
        thread.join()


def test_files_of_a_web_server_are_read_and_copied_again_if_they_have_changed(site: tuple[str, Path]) -> None:
    url, served = site
    for name, prompt in (("train-0.jsonl", "a"), ("train-1.jsonl", "b"), ("test.jsonl", "other")):
        (served / name).write_text(json.dumps({"prompt": prompt, "answer": "4"}) + "\n")
    assert prompts(f"{url}/train-1.jsonl?version=2") == ["b"]
    assert prompts(f"{url}/train-*.jsonl") == ["a", "b"]
    (served / "train-1.jsonl").write_text(json.dumps({"prompt": "longer", "answer": "4"}) + "\n")
    assert prompts(f"{url}/train-1.jsonl?version=2") == ["longer"]
    with pytest.raises(DataError, match=r"http://.*/none\.jsonl: no such file"):
        prompts(f"{url}/none.jsonl")


def test_a_store_whose_package_is_missing_names_it() -> None:
    with pytest.raises(DataError, match="paramiko"):
        prompts("sftp://host/train.jsonl")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"kind": "jsonl", "path": "https://host/train.jsonl?token=abc"}, "a spec holds no credentials"),
        ({"kind": "jsonl", "path": "tftp://host/train.jsonl"}, "expected a URL of s3, gs, abfs, file, https or"),
        ({"kind": "jsonl", "path": "s3://key:secret@bucket/train.jsonl"}, "a spec holds no credentials"),
        ({"kind": "datasets", "path": "s3://bucket/set"}, "is read from a disk"),
    ],
)
def test_a_url_of_another_kind_is_refused(source: dict[str, str], problem: str) -> None:
    found = TypeAdapter[Any](DataSource).validate_python(source)
    ((field, message),) = missing_data({"train": found})
    assert field == "data.train.path" and problem in message

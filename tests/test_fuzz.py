"""Damaged input for every parser: only its documented errors come out, whatever the bytes.

Good examples are mutated at random with a fixed seed: bytes flipped, pieces cut, doubled and spliced, brackets nested,
values of JSON replaced. A parser that hangs is stopped by the timeout of its test; memory is bounded where a file could
make it grow.
"""

from __future__ import annotations

import asyncio
import copy
import csv
import gzip
import io
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file

from tests.conftest import ROOT
from tests.orchestrator.data import test_published_preferences as published
from troupe.orchestrator.data.examples import load_examples
from troupe.orchestrator.data.prompts import PromptSource, load_pool
from troupe.orchestrator.errors import DataError, TroupeError, UsageError
from troupe.orchestrator.insight.samples import SampleQuery, count_samples, select_samples
from troupe.orchestrator.live.control import FOLDER, ControlServer, ask
from troupe.orchestrator.live.lock import LOCK_FILE, locked
from troupe.orchestrator.live.mailbox import Mailbox
from troupe.orchestrator.model_facts.model_size import SizeUnknown, read_size
from troupe.orchestrator.spec.checks.models import (
    model_folder,
    too_long,
    unsupported_head_size,
    windows_in_some_layers,
    wrong_kinds,
)
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.sources import DataSource
from troupe.orchestrator.telemetry.json_lines import JsonLinesFile
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointStore, InvalidCheckpoint, verify
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import FORMAT, states_of
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.agents.environments.gateway.completions import Completions, Generate
from troupe.workers.agents.environments.gateway.messages import Messages
from troupe.workers.agents.environments.gateway.protocol import Protocol
from troupe.workers.agents.environments.gateway.request import read_options, read_request
from troupe.workers.agents.environments.gateway.responses import Responses
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.isolation.child import BoundedOutput, Child
from troupe.workers.isolation.descendants import new_mark
from troupe.workers.rewards.runner import RewardProcess, Sample
from troupe.workers.training.checkpoint_files import opened, read_shard

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

SEED = 20_26
MEMORY = 256 << 10
"""KiB by which the process may grow for damaged inputs of some kilobytes."""
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1.5, 1e308, 10**30, float("nan"), float("inf"), -(2**63)),
    *("", "x", "\ud800", "a" * 300, "../../etc/passwd", "\x00", "\n"),
    *([], {}, [None], {"a": {}}, [[[]]], {"": ""}, ["x"] * 50, [1, [2, {"a": [3]}]]),
)
PIECES = (
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"{", b"}", b"[", b"]", b'"', b"\\u", b"\n", b"\r\n", b",", b":"),
    *(b"- ", b"&a ", b"*a", b"!!python/name:os.system ", b"9" * 400, b"1e999", b"NaN", b"\x1b[31m", b"null", b"true"),
    *(b"[" * 3000, b'{"a":' * 3000, (2**63).to_bytes(8, "little"), b"\x00" * 64, b"\x80\x04", b"PK\x03\x04", b"PAR1"),
)


@dataclass
class Mutations:
    """Random damage, the same in every run."""

    random: random.Random = field(default_factory=lambda: random.Random(SEED))

    def of_bytes(self, good: bytes, count: int) -> Iterator[bytes]:
        """Damaged copies of some bytes."""
        for _ in range(count):
            data = bytearray(good)
            for _ in range(self.random.choice((1, 1, 1, 2, 4, 8))):
                self._damage(data)
            yield bytes(data)

    def of_json(self, good: Any, count: int) -> Iterator[Any]:
        """Copies of a value with some of its parts replaced, removed or doubled."""
        for _ in range(count):
            value = copy.deepcopy(good)
            for _ in range(self.random.choice((1, 1, 2, 3))):
                value = self._replace(value)
            yield value

    def _damage(self, data: bytearray) -> None:
        place = self.random.randrange(len(data) + 1)
        kind = self.random.randrange(6)
        end = min(len(data), place + self.random.choice((1, 1, 4, 32, 4096)))
        if kind == 0 and place < len(data):
            data[place] ^= 1 << self.random.randrange(8)
        elif kind == 1:
            del data[place:end]
        elif kind == 2:
            data[place:place] = data[place:end] * self.random.choice((1, 2, 50))
        elif kind == 3:
            data[place:end] = self.random.choice(PIECES)
        elif kind == 4:
            data[place:place] = self.random.choice(PIECES)
        else:
            del data[place:]

    def _replace(self, value: Any) -> Any:
        """The value with one part changed: itself, or a part of it."""
        if isinstance(value, dict) and value and self.random.random() < 0.85:
            key = self.random.choice(list(value))
            if self.random.random() < 0.15:
                del value[key]
            elif self.random.random() < 0.1:
                value[str(self.random.choice(ODD))[:20]] = value.pop(key)
            else:
                value[key] = self._replace(value[key])
            return value
        if isinstance(value, list) and value and self.random.random() < 0.85:
            place = self.random.randrange(len(value))
            if self.random.random() < 0.15:
                del value[place]
            else:
                value[place] = self._replace(value[place])
            return value
        return copy.deepcopy(self.random.choice(ODD))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fails if the process grows by more than `MEMORY`, for a moment. Counting its allocations takes four times as long
    as the parsers do."""
    Path("/proc/self/clear_refs").write_text("5")  # the kernel begins to look for the peak again
    before = _kib("VmRSS")
    yield
    assert _kib("VmHWM") - before < MEMORY


def _kib(name: str) -> int:
    """A line of this process's memory in /proc."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def refuses(parse: Callable[[], object], *documented: type[BaseException]) -> bool:
    """Whether a parser refuses its input with a documented error. Any other error fails the test."""
    try:
        parse()
    except documented as error:
        assert str(error).strip(), "an error without a message"
        return True
    return False


def test_specs(tmp_path: Path) -> None:
    path, refused, total = tmp_path / "spec.yaml", 0, 0
    mutations = Mutations()
    with bounded_memory():
        for file in sorted((ROOT / "deploy" / "specs").glob("tiny-*.yaml")):
            for data in mutations.of_bytes(file.read_bytes(), 60):
                path.write_bytes(data)
                total += 1
                try:
                    plan_runs(read_document(path))
                except SpecError as error:
                    refused += 1
                    assert all(line.isprintable() for line in str(error).splitlines()), str(error)
    assert refused > total / 4


def test_overrides(tmp_path: Path) -> None:
    path, mutations = tmp_path / "spec.yaml", Mutations()
    path.write_bytes((ROOT / "deploy" / "specs" / "tiny-grpo.yaml").read_bytes())
    refused = 0
    for data in mutations.of_bytes(b"roles.rollout={workers: 1, cpus: 0.5, max_num_seqs: 32}", 600):
        text = data.decode("utf-8", "surrogateescape")
        refused += refuses(lambda text=text: plan_runs(read_document(path, [text])), SpecError)
    assert refused > 300


ROWS = [{"prompt": f"Say {i} é.", "answer": str(i), "meta": {"n": i, "tags": ["a", None]}} for i in range(6)]
CHATS = [{"prompt": [{"role": "user", "content": f"Say {i}."}], "answer": str(i)} for i in range(6)]


def _json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _csv_text() -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerows([["prompt", "answer"], *[[row["prompt"], row["answer"]] for row in ROWS]])
    return out.getvalue().encode()


def _parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, **options)
    return out.getvalue()


FORMATS: dict[str, tuple[str, str, bytes, int]] = {
    "jsonl": ("jsonl", "rows.jsonl", _json_lines(ROWS), 800),
    "chats": ("jsonl", "rows.jsonl", _json_lines(CHATS), 800),
    "jsonl.gz": ("jsonl", "rows.jsonl.gz", gzip.compress(_json_lines(ROWS), mtime=0), 400),
    "json": ("json", "rows.json", json.dumps(ROWS).encode(), 800),
    "csv": ("csv", "rows.csv", _csv_text(), 800),
    "parquet": ("parquet", "rows.parquet", _parquet(ROWS, compression="snappy"), 1200),
    "parquet.chats": ("parquet", "rows.parquet", _parquet(CHATS, compression="zstd"), 800),
    "parquet.times": (
        "parquet",
        "rows.parquet",
        _parquet([row | {"at": pa.scalar(i, pa.timestamp("us")).as_py()} for i, row in enumerate(ROWS)]),
        400,
    ),
}


@pytest.mark.parametrize("form", list(FORMATS))
def test_data(tmp_path: Path, form: str) -> None:
    kind, name, good, count = FORMATS[form]
    path = tmp_path / name
    columns = {"metadata": ["at"]} if form == "parquet.times" else {}
    source = TypeAdapter(DataSource).validate_python({"kind": kind, "path": str(path), **columns})
    path.write_bytes(good)
    load_pool(source)
    refused = 0
    with bounded_memory():
        for data in Mutations().of_bytes(good, count):
            path.write_bytes(data)
            try:
                load_pool(source)
            except DataError as error:
                refused += 1
                assert str(path.name) in str(error) or "data.train" in str(error)
    assert refused > count / 10


PROCESS = "process_reward_model"
MARKED = "prompt: null, steps: input, step_labels: label"


def test_data_of_another_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = TypeAdapter(DataSource).validate_python({"kind": "jsonl", "path": str(path), "metadata": ["meta"]})
    mutations = Mutations()
    for rows in (ROWS, CHATS):
        for value in mutations.of_json(rows, 800):
            path.write_bytes(_json_lines(value if isinstance(value, list) else [value]))
            refuses(lambda: load_pool(source), DataError)


@pytest.mark.parametrize(
    ("algorithm", "rows", "columns"),
    [
        ("reward_model", published.SHP, f"{published.OF_SHP}, margin: [score_A, score_B]"),
        (
            "reward_model",
            published.KAGGLE,
            "answers: [response_a, response_b], scores: [winner_model_a, winner_model_b]",
        ),
        ("reward_model", published.NECTAR, "answers: answers.answer, ranks: answers.rank"),
        ("reward_model", [{"chosen": published.hh("good"), "rejected": published.hh("bad")}], "prompt: null"),
        ("reward_model", published.one_in_a_row(0, 4, 3), "answers: response, scores: helpfulness, one_in_a_row: true"),
        (PROCESS, [{"prompt": "1?", "completions": ["a", "b"], "labels": [True, 0.5]}], "separator: c"),
        (PROCESS, [{"q": "1?", "s": published.tree()}], "prompt: q, steps: s, step_labels: null"),
        (PROCESS, [{"input": "1? Step 1: a ки\nb ки", "label": "1? Step 1: a +\nb -"}], MARKED),
    ],
)
def test_examples_of_another_shape(algorithm: str, rows: list[dict[str, Any]], columns: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    spec = published.spec(path, algorithm, columns)
    for value in Mutations().of_json(rows, 400):
        path.write_bytes(_json_lines(value if isinstance(value, list) else [value]))
        refuses(lambda: load_examples(spec), DataError)


def test_folders_of_datasets(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path / "data"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    source = TypeAdapter(DataSource).validate_python({"kind": "datasets", "path": str(folder)})
    load_pool(source)
    mutations = Mutations()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        good = file.read_bytes()
        for data in mutations.of_bytes(good, 60):
            file.unlink()  # a mapping of the old file stays as it is
            file.write_bytes(data)
            refuses(lambda: load_pool(source), DataError)
        file.unlink()
        file.write_bytes(good)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    path = store.begin(3)
    (path / "policy").mkdir()
    (path / "policy" / "weights").write_bytes(b"weights")
    return store.commit(path, {"step": 3, "ledger": {"closed": ["a"]}}).path


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "policy/weights"])
def test_files_of_a_checkpoint(checkpoint: Path, name: str) -> None:
    good = (checkpoint / name).read_bytes()
    for data in Mutations().of_bytes(good, 150):
        (checkpoint / name).write_bytes(data)
        refused = refuses(lambda: verify(checkpoint), InvalidCheckpoint)
        assert refused or data == good or name == "manifest.json"


def test_the_state_of_a_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.dispatch("p0", 0, 1, 2)
    ledger.dispatch("p1", 1, 2, 2)
    ledger.mark_dropped("p0", 0, "reward: error")
    (tmp_path / "rows.jsonl").write_bytes(_json_lines(ROWS))
    pool = load_pool(TypeAdapter(DataSource).validate_python({"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}))
    prompts = PromptSource(pool, 1)
    prompts.next()
    good = {
        "ledger": json.loads(json.dumps(ledger.state())),
        "format": FORMAT,
        "parts": {"penalty": PenaltyState().model_dump(mode="json")},
        "source": {"prompts": prompts.state(), "advantages": AdvantageState().model_dump(mode="json")},
        "trainers": {"policy": {"zero_stage": 1, "workers": 2, "dtype": "float32"}},
    }

    def restore(state: Any) -> None:
        found = Checkpoint(3, tmp_path, state)
        with found.restoring():
            Ledger.restore(state["ledger"])
            AdvantageState.model_validate(state["source"]["advantages"])
            PromptSource(pool, 1).restore(state["source"]["prompts"])
            PenaltyState.model_validate(states_of(state)["penalty"])
        found.trainers()

    restore(good)
    refused = sum(
        refuses(lambda value=value: restore(value), TroupeError)
        for value in Mutations().of_json(good, 2000)
        if isinstance(value, dict)  # as `verify` requires
    )
    assert refused > 800


def test_files_of_a_trainer(tmp_path: Path) -> None:
    mutations = Mutations()
    save_file({"updates": torch.tensor([3]), "torch_rng": torch.arange(64)}, tmp_path / "good.safetensors")
    good = (tmp_path / "good.safetensors").read_bytes()
    path = tmp_path / "bad.safetensors"

    def read_all() -> None:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)

    for data in mutations.of_bytes(good, 500):
        path.write_bytes(data)
        refuses(read_all, ValueError)
    state = {"module": {"w": torch.ones(8)}, "param_shapes": [{"w": torch.Size([8])}], "optimizer": None, "steps": 3}
    for zipped in (True, False):
        torch.save(state, tmp_path / "good.pt", _use_new_zipfile_serialization=zipped)
        good = (tmp_path / "good.pt").read_bytes()
        for data in mutations.of_bytes(good, 400):
            (tmp_path / "bad.pt").write_bytes(data)
            refuses(lambda: read_shard(tmp_path / "bad.pt"), ValueError)


def test_folders_of_models(tmp_path: Path, tiny_model: Path) -> None:
    config, header = tmp_path / "config.json", tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    good_config = json.loads((tiny_model / "config.json").read_bytes())
    size = int.from_bytes((tiny_model / "model.safetensors").read_bytes()[:8], "little")
    good_header = (tiny_model / "model.safetensors").read_bytes()[: 8 + size]
    parsed = json.loads(good_header[8:])
    config.write_text(json.dumps(good_config))
    header.write_bytes(good_header)
    model = ModelConfig(path=str(tmp_path))

    def examine() -> None:
        model_folder(tmp_path)
        list(too_long({"model": model}, {"sampling.max_tokens": 64}))
        list(unsupported_head_size(tmp_path))
        list(windows_in_some_layers(tmp_path))
        list(wrong_kinds({"model": model, "roles.reward.model": model}, "policy"))
        read_size(tmp_path)

    examine()
    mutations = Mutations()
    with bounded_memory():
        for value in mutations.of_json(good_config | {"text_config": good_config}, 600):
            config.write_text(json.dumps(value))
            refuses(examine, SizeUnknown)
        for data in mutations.of_bytes(json.dumps(good_config).encode(), 300):
            config.write_bytes(data)
            refuses(examine, SizeUnknown)
        config.write_text(json.dumps(good_config))
        for data in mutations.of_bytes(good_header, 400):
            header.write_bytes(data)
            refuses(examine, SizeUnknown)
        for value in mutations.of_json(parsed, 300):
            text = json.dumps(value).encode()
            header.write_bytes(len(text).to_bytes(8, "little") + text)
            refuses(examine, SizeUnknown)
        header.rename(tmp_path / "model-1.safetensors")
        for value in mutations.of_json({"weight_map": dict.fromkeys(list(parsed)[:4], "model-1.safetensors")}, 300):
            index.write_text(json.dumps(value))
            refuses(examine, SizeUnknown)


def test_bombs_in_the_header_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    shape = "[" + ",".join(["1125899906842623"] * 200_000) + "]"
    with bounded_memory():
        for length, header in (
            (2**60, b"{}"),
            (2**64 - 1, b"{}"),
            (None, b"[" * 100_000),
            (None, b'{"a":' * 100_000),
            (None, b'{"a": {"shape": %s}}' % shape.encode()),
            (None, b'{"a": {"shape": [%s]}}' % (b"9" * 100_000)),
            (None, b'{"a": {"shape": [1e999]}}'),
        ):
            path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
            assert refuses(lambda: read_size(tmp_path), SizeUnknown)
        with path.open("wb") as file:  # a sparse file with a header of a gigabyte
            file.write((1 << 30).to_bytes(8, "little"))
            file.truncate(2 << 30)
        assert refuses(lambda: read_size(tmp_path), SizeUnknown)


async def test_requests_to_a_run(tmp_path: Path) -> None:
    class Scaler:
        """Answers every request that can be read."""

        def change(self, changes: dict[str, Any]) -> None:
            raise UsageError("refused")

        def states(self) -> tuple[Any, ...]:
            return ()

    scaler: Any = Scaler()
    server = ControlServer(tmp_path, scaler)
    await server.open()
    folder = tmp_path / FOLDER
    for number, data in enumerate(Mutations().of_bytes(b'{"changes": {"roles.rollout.workers": 2}}', 400)):
        (folder / f"request-{number:04d}.json").write_bytes(data)
    async with asyncio.timeout(60):
        while len(list(folder.glob("answer-*.json"))) < 400:
            await asyncio.sleep(0.1)
    await server.close()


def test_answers_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FOLDER).mkdir()
    answer = {"error": "", "roles": [{"role": "rollout", "wanted": 1, "running": 1, "scaling": False}]}
    mutations, lock = Mutations(), tmp_path / LOCK_FILE
    with locked(tmp_path):
        holder = lock.read_bytes()
    values = [json.dumps(value).encode() for value in mutations.of_json(json.loads(holder), 200)]
    for data in (*mutations.of_bytes(holder, 200), *values):
        lock.write_bytes(data)
        refuses(lambda: ask(tmp_path, {}, 0.0), UsageError, TroupeError)
    lock.write_bytes(holder)
    answers = (json.dumps(value).encode() for value in mutations.of_json(answer, 100))
    monkeypatch.setattr(Mailbox, "ask", lambda *_: next(answers))
    for _ in range(100):
        with suppress(UsageError, TroupeError):
            ask(tmp_path, {}, 0.0)


@pytest.mark.parametrize("process", [False, True])
def test_replies_of_a_reward_process(process: bool) -> None:
    sample = Sample("a response", "answer", "{}", 3, "stop")
    result = {"value": 1.0, "steps": [[3, 0.5], [10, 1.0]]}
    good = json.dumps({"id": 1, "results": [result]}).encode()
    mutations = Mutations()
    lines = list(mutations.of_bytes(good, 300))
    lines += [json.dumps(value).encode() for value in mutations.of_json(json.loads(good), 500)]
    config = RewardFunctionConfig(name="mine:f", process=process)
    numbers = 0
    for line in lines:
        runner = RewardProcess(config, 512)
        ours, theirs = socket.socketpair()
        # The child's side of the protocol; no process is started.
        runner._child = _ConnectedChild(ours)
        child = threading.Thread(target=_reply, args=(theirs, line.replace(b"\n", b" ") + b"\n"))
        child.start()
        (outcome,) = runner.score([sample])
        assert (outcome.value is None) == (outcome.status != "ok")
        numbers += outcome.value is not None
        runner.close()
        child.join()
    assert 0 < numbers < len(lines)


def _reply(connection: socket.socket, line: bytes) -> None:
    """Send a line behind the request, as far as somebody reads it, and end."""
    with connection, suppress(OSError):
        while not connection.recv(1 << 16).endswith(b"\n"):
            pass
        connection.sendall(line)


class _ConnectedChild(Child):
    """A child of which only the connection exists."""

    def __init__(self, connection: socket.socket) -> None:
        self.mark, self.connection, self._buffer = new_mark(), connection, b""
        self._owner_pipe = os.open(os.devnull, os.O_RDONLY)
        self._process = _Ended()
        self._output = BoundedOutput("child")
        self._output.started()


class _Ended:
    """Stands for the process: it runs, and ends when it is told to."""

    pid, returncode = 2**22 + 1, 0

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        return None


async def test_requests_of_an_agent() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    good = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        ],
        "tools": [tool],
        "tool_choice": "auto",
        "max_tokens": 16,
        "stop": ["x"],
        "n": 2,
    }
    read_request(read_options(good))
    refused = 0
    for value in Mutations().of_json(good, 3000):
        refused += refuses(
            lambda value=value: read_request(read_options(value)), ValueError, TypeError, KeyError, OverflowError
        )
    assert refused > 300


GATEWAY: dict[type[Protocol], dict[str, Any]] = {
    Messages: {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "dA=="},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
        ],
        "tools": [{"name": "add", "input_schema": {}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "adaptive"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "max_tokens": 16,
    },
    Responses: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "dA=="},
            {"type": "function_call", "call_id": "1", "name": "add", "namespace": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "5"},
        ],
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "add", "parameters": {}}]}],
        "tool_choice": {"type": "function", "name": "add", "namespace": "n"},
        "text": {"format": {"type": "json_schema", "schema": {}}},
        "include": ["reasoning.encrypted_content"],
        "instructions": "i",
    },
    Completions: {"prompt": [1, 2], "n": 2, "stop": ["x"], "logprobs": 0, "max_tokens": 5},
    Generate: {"token_ids": [1, 2], "sampling_params": {"n": 2, "stop": ["x"], "logprobs": 1, "max_tokens": 5}},
}
UNREAD = (ValueError, TypeError, KeyError, OverflowError, AttributeError, RecursionError)
"""What the endpoint answers with a status of 400."""


@pytest.mark.parametrize("kind", GATEWAY)
async def test_requests_of_the_gateways_protocols(kind: type[Protocol]) -> None:
    def read(value: Any) -> None:
        protocol = kind()
        protocol.fields.check(value)
        read_request(read_options(protocol.request(value, [])))

    good = GATEWAY[kind]
    read(good)
    changed = [value for value in Mutations().of_json(good, 2000) if isinstance(value, dict)]
    assert sum(refuses(lambda value=value: read(value), *UNREAD) for value in changed) > 100


def test_records_of_a_run(tmp_path: Path) -> None:
    spec, metrics = tmp_path / "spec.yaml", tmp_path / "metrics.jsonl"
    file = tmp_path / "trajectories" / "step-000001.parquet"
    file.parent.mkdir()
    step = {"step": 1, "time": 1.0, "reward/mean": 0.5}
    goods = {
        spec: (ROOT / "deploy" / "specs" / "tiny-grpo.yaml").read_bytes(),
        metrics: (json.dumps(step) + "\n").encode() * 4,
        file: _parquet([{"step": 1, "prompt_uid": "p", "response": "é", "reward": 1.0, "response_ids": [1]}] * 4),
    }

    def read() -> None:
        run = RunFolder(tmp_path)
        assert run.name and all(isinstance(number, int) for number in run.steps())
        select_samples(run, SampleQuery(where="reward > 0 and len(response) < 9"), ["response", "response_ids"])
        count_samples(run, SampleQuery(step=1))
        run.samples(1, ["prompt_uid"]).to_pylist()

    mutations = Mutations()
    for path, good in goods.items():
        for other, content in goods.items():
            other.write_bytes(content)
        read()
        for data in mutations.of_bytes(good, 100 if path == file else 40):
            path.write_bytes(data)
            refuses(read, UsageError, DataError)


def test_conditions_on_samples(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: tiny\n")
    (tmp_path / "trajectories").mkdir()
    content = _parquet([{"step": 1, "prompt_uid": "p", "response": "é", "reward": 1.0, "response_ids": [1]}])
    (tmp_path / "trajectories" / "step-000001.parquet").write_bytes(content)
    run = RunFolder(tmp_path)
    good = b"reward < 0 AND NOT (step IN (1, 2)) OR response LIKE '%x%' AND len(response_ids) > 3 OR answer IS NULL"
    refused = 0
    for data in Mutations().of_bytes(good, 150):
        text = data.decode("utf-8", "surrogateescape")
        refused += refuses(lambda text=text: count_samples(run, SampleQuery(where=text)), UsageError)
    assert refused > 40


def test_metrics_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = "".join(json.dumps({"step": step, "time": 1.0, "reward/mean": 0.5}) + "\n" for step in range(6)).encode()
    for data in Mutations().of_bytes(good, 600):
        path.write_bytes(data)
        sink = JsonLinesFile(path, keep_through=3)
        sink.write(4, {"reward/mean": 1.0})
        sink.close()
        assert json.loads(path.read_bytes().splitlines()[-1])["step"] == 4

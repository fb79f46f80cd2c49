"""Throughput of the product's tables through the object store, and the number of copies of their bytes.

    python -m benchmarks.data_plane --table train
    python -m benchmarks.data_plane --table rollouts
    python -m benchmarks.data_plane --samples 62000 --repeat 1   # 4 GB

`put` is `Cluster.put`, which the product uses; it returns when the bytes are in shared memory. `get` copies nothing: it
maps the table in a time that does not depend on its size, so GB/s of `get` alone would be meaningless. The benchmark
therefore reads every byte after `get`, and also times the same reading of a table in private memory. What a trainer
waits for is another contender: `get`, decode, and the tensors of the first micro-batch. Baseline: `memcpy` from the
table to a warm buffer.

Above 1 GB only what fits in a machine of 24 GiB is measured: no torch tensors and no pickle, which hold several copies,
and one table in the store.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray
import torch

from benchmarks.support.harness import (
    GIGABYTES,
    NotCorrect,
    Report,
    Turn,
    Unfit,
    command_parser,
    run_benchmark,
    take_turns,
)
from benchmarks.support.processes import Meter
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.workers.contract.messages import ROLLOUTS, TRAIN
from troupe.workers.models.ragged import Ragged, list_column, ragged
from troupe.workers.models.token_batch import TokenTable

MEMCPY, PUT, GET, TORCH = "memcpy", "troupe put", "troupe get, then read", "ray.put of torch tensors"
BATCH, TORCH_BATCH = "troupe get to first batch", "ray.get of torch tensors to first batch"
BUFFER = "ray.put of one buffer"
"""As many unstructured bytes as the table has: the cost of Ray itself."""
PROMPT_TOKENS = 256
CHARACTERS = 4
"""Characters of text per response token."""
HELD_BYTES = 2**26
"""Bytes that a turn keeps in the store before it drops them, so that the store reuses memory, as in a long run."""
BIG_BYTES = 2**30
"""A table from this size on is alone in the store, and has no contenders that hold several copies of it."""
MEMCPY_BYTES = 2**30
"""Size of the warm buffer that `memcpy` copies to, again and again."""
BIG_COPIES = 2.5
"""Memory that a big table needs, in multiples of its size: itself, its place in the store, what it is built from."""
FIRST_ROWS = 2
"""Rows of the first micro-batch."""
FREE_S = 0.02
"""Unmeasured wait for the store to free dropped objects."""


def rollouts_table(samples: int, tokens: int, seed: int) -> pa.Table:
    """A ROLLOUTS table of one group, one row per sample, built from rows as a rollout worker builds it."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 50_000, PROMPT_TOKENS).tolist()
    rows = [
        {
            "prompt_uid": "e0-r7",
            "sample_index": index,
            "attempt": 0,
            "segment": 0,
            "prompt_ids": prompt,
            "response_ids": rng.integers(0, 50_000, tokens).tolist(),
            "rollout_logprobs": (-rng.exponential(1.0, tokens)).tolist(),
            "loss_mask": [True] * tokens,
            "weight_versions": [{"version": 3, "start": 0, "end": tokens}],
            "episode_status": "ok",
            "conversation": "",
            "turn_rewards": [],
            "turns": [{"name": "assistant", "start": 0, "end": tokens}],
            "finish_reason": "length",
            "response": bytes(rng.integers(97, 123, CHARACTERS * tokens, dtype=np.uint8)).decode(),
            "messages": "[]",
            "answer": "12",
            "metadata": "{}",
            "engine": "rollout-0",
            "generate_s": 1.5,
            "first_token_s": 0.25,
        }
        for index in range(samples)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def train_table(samples: int, tokens: int, seed: int) -> pa.Table:
    """A TRAIN table of one step's batch, with the columns of GRPO."""
    generator = torch.Generator().manual_seed(seed)

    def ids(each: int) -> pa.Array:
        values = torch.randint(0, 50_000, (samples * each,), generator=generator, dtype=torch.int32)
        return list_column(values, torch.full((samples,), each), pa.int32())

    def floats() -> pa.Array:
        values = torch.randn(samples * tokens, generator=generator)
        return list_column(values, torch.full((samples,), tokens), pa.float32())

    columns: dict[str, pa.Array] = {
        "prompt_uid": pa.array([f"e0-r{index // 8}" for index in range(samples)]),
        "sample_index": pa.array([index % 8 for index in range(samples)], pa.int32()),
        "attempt": pa.array([0] * samples, pa.int32()),
        "segment": pa.array([0] * samples, pa.int32()),
        "prompt_ids": ids(PROMPT_TOKENS),
        "response_ids": ids(tokens),
        "loss_mask": list_column(
            torch.ones(samples * tokens, dtype=torch.bool), torch.full((samples,), tokens), pa.bool_()
        ),
        "rollout_logprobs": floats(),
        "old_logprobs": floats(),
        "advantages": floats(),
        "reward": pa.array(torch.rand(samples, generator=generator).double().numpy()),
    }
    arrays = [columns.get(field.name, pa.nulls(samples, field.type)) for field in TRAIN]
    return pa.Table.from_arrays(arrays, schema=TRAIN)


def tensors_of(table: pa.Table) -> dict[str, Ragged]:
    """The token columns of a table as torch tensors, the form that other frameworks send."""
    columns = [
        name
        for name in table.column_names
        if pa.types.is_list(table.schema.field(name).type)
        and not pa.types.is_struct(table.schema.field(name).type.value_type)
        and not table[name].null_count
    ]
    return {name: ragged(table[name]) for name in columns}


def buffers(table: pa.Table) -> list[pa.Buffer]:
    """Every buffer of a table."""
    return [b for column in table.columns for chunk in column.chunks for b in chunk.buffers() if b is not None]


def tensor_bytes(tensors: dict[str, Ragged]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for one in tensors.values() for tensor in (one.values, one.lengths))


def read(table: pa.Table) -> int:
    """Read every byte once; returns the XOR of all 64-bit words and of the sums of the remaining bytes."""
    total = 0
    for buffer in buffers(table):
        whole = buffer.size // 8 * 8
        total ^= int(np.bitwise_xor.reduce(np.frombuffer(buffer, np.uint64, whole // 8))) if whole else 0
        total ^= sum(buffer.slice(whole).to_pybytes())
    return total


def shared_ranges() -> list[tuple[int, int]]:
    """Address ranges (start, end) of the shared memory mapped into this process."""
    ranges: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        if permissions[3] == "s":
            start, _, end = span.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def bytes_in_place(table: pa.Table) -> int:
    """Number of the table's bytes that are in shared memory."""
    ranges = shared_ranges()
    return sum(b.size for b in buffers(table) if any(start <= b.address < end for start, end in ranges))


@dataclass(frozen=True)
class Copies:
    """Copies per byte of a table, at `put` and at `get`."""

    put: float
    get: float

    @classmethod
    def of(cls, table: pa.Table, got: pa.Table) -> Copies:
        """Count the copies of a table.

        At `put`, a buffer that is written to shared memory directly counts 1, and one that is serialized into a stream
        or a pickle first counts 2. At `get`, buffers in shared memory count 0 and others 1.

        Args:
            table: The table that was put.
            got: The table that came out of the store.
        """
        moved: list[pickle.PickleBuffer] = []
        inside = len(pickle.dumps(table, protocol=5, buffer_callback=moved.append))
        own = {buffer.address for buffer in buffers(table)}
        sizes = [(pa.py_buffer(one).address in own, one.raw().nbytes) for one in moved]
        put = sum(size if direct else 2 * size for direct, size in sizes) + 2 * inside
        size = sum(buffer.size for buffer in buffers(table))
        return cls(put / size, (size - bytes_in_place(got) + inside) / size)


class TransferContenders:
    """The ways to move the same content; a turn moves it `repeat` times."""

    def __init__(self, table: pa.Table, repeat: int) -> None:
        self._table = table
        self._repeat = repeat
        self._size = sum(buffer.size for buffer in buffers(table))
        self._tensors = tensors_of(table)
        self._big = self._size >= BIG_BYTES
        self._tensors = {} if self._big else tensors_of(table)
        self._target = np.ones(min(self._size, MEMCPY_BYTES), np.uint8)
        self._ref = Cluster.put(table)
        self._tensors_ref = Cluster.put(self._tensors)
        self.copies = self._checked()

    def all(self) -> dict[str, Callable[[], Iterator[float]]]:
        """By contender, a function that yields the seconds of each repetition."""
        contenders: dict[str, Callable[[], Iterator[float]]] = {
            MEMCPY: self._memcpy,
            PUT: self._replace if self._big else lambda: self._put(self._table),
            BATCH: lambda: self._timed(lambda: first_batch(ray.get(self._ref))),
            "read where it is": lambda: self._timed(lambda: read(self._table)),
            GET: lambda: self._timed(lambda: read(ray.get(self._ref))),
        }
        if self._big:
            return contenders
        return contenders | {
            BUFFER: lambda: self._put(self._target),
            TORCH: lambda: self._put(self._tensors),
            TORCH_BATCH: lambda: self._timed(lambda: first_rows(ray.get(self._tensors_ref))),
            "pickle and unpickle": lambda: self._timed(lambda: pickle.loads(pickle.dumps(self._table))),  # noqa: S301
        }

    def turn(self, name: str) -> Turn:
        """Run one turn of a contender."""
        size = tensor_bytes(self._tensors) if name in (TORCH, TORCH_BATCH) else self._size
        copies = {PUT: self.copies.put, GET: self.copies.get}
        figures = {"copies per byte": copies[name]} if name in copies else {}
        if name == GET:
            began = time.perf_counter()
            ray.get(self._ref)
            figures["get alone, ms"] = 1e3 * (time.perf_counter() - began)
        meter = Meter()
        return meter.turn(self._repeat * size / 1e9, sum(self.all()[name]()), figures=figures)

    def _checked(self) -> Copies:
        """Check that every way preserves the content. Raises NotCorrect."""
        got: pa.Table = ray.get(self._ref)
        if not got.equals(self._table) or got.schema.metadata != self._table.schema.metadata:
            raise NotCorrect("the table from the store differs from the one that was put")
        if read(got) != read(self._table):
            raise NotCorrect("the table from the store has another digest than the one that was put")
        batch, tokens = first_batch(got), first_rows(tensors_of(self._table.slice(0, FIRST_ROWS)))
        if batch != tokens:
            raise NotCorrect(f"the first batch sums to {batch}, its rows in the table to {tokens}")
        if self._big:
            return Copies.of(self._table, got)
        if not pickle.loads(pickle.dumps(self._table)).equals(self._table):  # noqa: S301 (its own bytes)
            raise NotCorrect("the unpickled table differs from the one that was pickled")
        tensors = ray.get(ray.put(self._tensors))
        for name, one in self._tensors.items():
            if not torch.equal(one.values, tensors[name].values) or not torch.equal(one.lengths, tensors[name].lengths):
                raise NotCorrect(f"the tensors of {name} from the store differ from those that were put")
        return Copies.of(self._table, got)

    def _memcpy(self) -> Iterator[float]:
        sources = [np.frombuffer(one, np.uint8) for one in buffers(self._table)]
        pieces = [own[at : at + MEMCPY_BYTES] for own in sources for at in range(0, own.size, MEMCPY_BYTES)]
        for _ in range(self._repeat):
            began, at = time.perf_counter(), 0
            for piece in pieces:
                at = at if at + piece.size <= self._target.size else 0
                np.copyto(self._target[at : at + piece.size], piece)
                at += piece.size
            yield time.perf_counter() - began

    def _replace(self) -> Iterator[float]:
        """Puts the only table of the store, once the one before has left it."""
        for _ in range(self._repeat):
            del self._ref
            time.sleep(1.0)  # a table of gigabytes leaves the store later
            began = time.perf_counter()
            self._ref = Cluster.put(self._table)
            yield time.perf_counter() - began

    def _put(self, what: Any) -> Iterator[float]:
        held: list[Any] = []
        for _ in range(self._repeat):
            began = time.perf_counter()
            held.append(Cluster.put(what))
            yield time.perf_counter() - began
            if len(held) * self._size > HELD_BYTES:
                held.clear()
                time.sleep(FREE_S)

    def _timed(self, work: Callable[[], object]) -> Iterator[float]:
        for _ in range(self._repeat):
            began = time.perf_counter()
            work()
            yield time.perf_counter() - began


def first_batch(table: pa.Table) -> float:
    """Decode a TRAIN or ROLLOUTS table as a trainer does; returns the sum of the first micro-batch's tokens."""
    batch = TokenTable(table).packed_batch(range(FIRST_ROWS))
    return float(batch.input_ids.sum())


def first_rows(tensors: dict[str, Ragged]) -> float:
    """The sum of the tokens of the first rows."""
    both = (tensors[name] for name in ("prompt_ids", "response_ids"))
    return float(sum(int(one.values[: int(one.lengths[:FIRST_ROWS].sum())].sum()) for one in both))


def memory_problem(samples: int, tokens: int, available: int) -> str:
    """Why a TRAIN table does not fit in `available` bytes; empty where it does."""
    size = samples * 4 * (PROMPT_TOKENS + 4 * tokens)
    needed = int(BIG_COPIES * size) + MEMCPY_BYTES
    if size < BIG_BYTES or needed <= available:
        return ""
    return f"a table of {size / 1e9:.1f} GB needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} are available"


async def measure(given: argparse.Namespace) -> Report:
    """Start Ray, check the content, alternate the turns. Raises NotCorrect, Unfit."""
    kind, tokens = given.table, given.tokens
    samples, repeat = {"train": (1024, 8), "rollouts": (8, 64)}[kind]
    samples, repeat = given.samples or samples, given.repeat or repeat
    if problem := memory_problem(samples, tokens, psutil.virtual_memory().available):
        raise Unfit(problem)
    table = {"rollouts": rollouts_table, "train": train_table}[kind](samples, tokens, 17)
    cluster = Cluster.connect({"CPU": 1.0})
    try:
        contenders = TransferContenders(table, repeat)

        def contender(name: str) -> Callable[[int], Any]:
            async def take(turn: int) -> Turn:
                return contenders.turn(name)

            return take

        taken = await take_turns({name: contender(name) for name in contenders.all()}, given.turns)
    finally:
        cluster.abandon()
    size = sum(buffer.size for buffer in buffers(table))
    checks = {
        "content": f"{table.num_rows} rows and the digest of all {size} bytes equal after the store",
        "copies": f"{contenders.copies.put:.4f} per byte at put, {contenders.copies.get:.4f} at get",
    }
    arguments = {"samples": samples, "repeat": repeat, "bytes": size}
    return Report("data_plane", taken, MEMCPY, checks, GIGABYTES, arguments)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("data_plane", __doc__, 9)
    add = parser.add_argument
    add("--table", choices=("train", "rollouts"), default="train", help="train: a step's batch; rollouts: one group")
    add("--samples", type=int, default=0, help="rows of the table (default: 1024 for train, 8 for rollouts)")
    add("--tokens", type=int, default=4096, help="response tokens per row (default: 4096)")
    add("--repeat", type=int, default=0, help="moves of the table per turn (default: 8 for train, 64 for rollouts)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

"""One version of the policy's weights as a file in shared memory: written once, verified, mapped by every engine.

The payload is the raw bytes of all tensors in order, each aligned to 64 bytes, with zeros in the gaps. Every tensor is
cut into pieces of 1 MiB, which all cores copy and hash in parallel. The digest is xxh3-128 over the digests of the
pieces followed by names, types and shapes. One file is reused for all versions: its pages stay mapped, and writing to
new shared memory takes several times as long.

If a reader still uses the previous version, the publisher leaves that file to it and writes a new one of the same name
(`troupe.workers.weights.shared_memory`).
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from troupe.workers.contract.messages import TensorSpec, WeightsDamaged, WeightUpdate
from troupe.workers.isolation.lifetime import remove_at_death, retire
from troupe.workers.weights.delta import ChangedWords, DeltaRefused, apply_delta
from troupe.workers.weights.shared_memory import (
    NOTHING,
    Bytes,
    FileMapping,
    WeightFileRefused,
    check_name,
    new_path,
    open_existing,
    open_for_writing,
    remove_stale,
    shared_directory,
)

ALIGNMENT = 64
_PIECE = 1 << 20  # hashed and written while it is in the core's cache
_STRETCH = 16 * _PIECE  # work of one thread at a time: submitting a single piece costs as much as hashing it
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
NamedTensors = Iterable[tuple[str, torch.Tensor]]
WeightSource = NamedTensors | Callable[[], NamedTensors]
"""Names and tensors that can be iterated once per version, or a function that returns them."""


def weight_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> int:
    """Size of a weight file of these tensors: (name, type, shape) of each."""
    sizes = (math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    return sum(size + -size % ALIGNMENT for size in sizes)


class WeightDigestMismatch(WeightsDamaged):
    """The weights that arrived are not the ones that were published."""

    def __init__(self, name: str, expected: str, got: str) -> None:
        """`name`: the file or the engine. `expected`, `got`: digests, or why a digest is missing."""
        super().__init__(name, expected, got)
        self.name, self.expected, self.got = name, expected, got

    def __str__(self) -> str:
        return f"{self.name}: weights have digest {self.got}, the published digest is {self.expected}"


class WeightPublisher:
    """Writes each version of `source` into one reused file."""

    def __init__(
        self, source: WeightSource, directory: Path, run_id: str, writes: bool = True, lasting: bool = False
    ) -> None:
        """Prepare the file, whose name has `run_id`, without those of dead processes of the run. A tied weight must
        occur once. If iterating is collective (ZeRO-3), every rank has a publisher, and all but one iterate
        without writing. `lasting` tensors, valid after the next is requested, are written in parallel. Raises
        ValueError for a bad `run_id`."""
        self._source = source
        self._path = new_path(directory, run_id)
        self._writes = writes
        self._lasting = lasting
        self._mapping = FileMapping(mmap.PROT_READ | mmap.PROT_WRITE)
        self._published: WeightUpdate | None = None
        """The update in the file, or None while it is written, and after a failure."""
        self._changes: ChangedWords | None = None
        """The changes of the last version, if its base was named."""
        self._expect_dense = False
        """Whether the last comparison found that all weights should travel: as a rule the next one finds the same."""
        if writes:
            remove_stale(directory, run_id)
            remove_at_death(self._path)

    def publish(self, version: int, base: str = "") -> WeightUpdate | None:
        """Write all tensors; returns layout and digest, or None on a rank that only iterates. `base`: digest of the
        previous version, for `delta`. Raises ValueError for no tensors or a name twice, OSError with the path."""
        source = self._source() if callable(self._source) else self._source
        if not self._writes:
            for _ in source:
                pass
            return None
        specs: list[TensorSpec] = []
        names: set[str] = set()
        before, self._published, self._changes = self._published, None, None
        compares = base and before is not None and before.digest == base
        changes = ChangedWords(base, self._expect_dense) if compares else None
        with open_for_writing(self._path) as fd, _cores() as cores:
            mapped = self._mapping.of(fd, os.fstat(fd).st_size)
            payload = _PayloadWriter(fd, self._path, mapped, cores, changes)
            for name, tensor in source:
                if name in names:
                    raise ValueError(f"{name} occurs twice in the weight source")
                names.add(name)
                data = _host_bytes(tensor)
                dtype = str(tensor.dtype).removeprefix("torch.")
                specs.append(TensorSpec(name, dtype, tuple(tensor.shape), payload.size, data.nbytes))
                payload.append(data)
                if not self._lasting:
                    payload.flush()
            payload.flush()
        if not specs:
            raise ValueError("the weight source is empty (is it an exhausted iterator?)")
        digest = _digest(payload.digests, specs)
        update = WeightUpdate(version, digest, str(self._path), socket.gethostname(), tuple(specs), payload.size)
        if changes is not None:
            self._expect_dense = changes.dense
        if before is not None and before.tensors == update.tensors:
            self._changes = changes
        self._published = update
        return update

    def delta(self, update: WeightUpdate) -> Bytes:
        """The changes of `update`, the last one published, since its base; empty if all is cheaper, or another."""
        if self._published != update or self._changes is None:
            return NOTHING
        changes, self._changes = self._changes, None
        return changes.encode(update.nbytes)

    def close(self) -> None:
        """Remove the file; engines that have mapped it keep their view."""
        self._mapping.drop()
        if self._writes:
            retire(self._path)


@dataclass(frozen=True)
class RankWeights:
    """The weights as one rank of the policy has them."""

    tensors: Callable[[], NamedTensors]
    """Names and whole tensors; iterating is collective."""
    shapes: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    """Names, types and whole shapes, in the same order."""
    rank: int
    gathers: bool
    """Whether a tensor is valid only until the next one is requested (ZeRO-3)."""

    def publisher(self, directory: Path, run_id: str) -> WeightPublisher:
        """The writer of a file in this folder. Every rank participates in iterating; the first one writes."""
        return WeightPublisher(self.tensors, directory, run_id, writes=self.rank == 0, lasting=not self.gathers)


def shared_memory_publisher(weights: RankWeights, run_id: str) -> WeightPublisher:
    """The writer of a file in shared memory, or in the temporary folder if the weights do not fit."""
    return weights.publisher(shared_directory(weight_bytes(weights.shapes)), run_id)


class MappedWeights:
    """A weight file, mapped read-only. Call :meth:`verify` before using the tensors."""

    def __init__(self, update: WeightUpdate, payload: Bytes) -> None:
        """`payload`: [update.nbytes] view of the mapping, which lives as long as any view of it."""
        self.update = update
        self.payload = payload

    def verify(self) -> None:
        """Check payload and description against the published digest. Raises WeightDigestMismatch if they are not the
        published ones, and WeightFileRefused if the description does not fit the payload."""
        for spec in self.update.tensors:
            self._dtype(spec)
        pieces = list(self._pieces())
        count = _STRETCH // _PIECE
        stretches = [pieces[start : start + count] for start in range(0, len(pieces), count)]
        with _cores() as cores:
            got = _digest(itertools.chain.from_iterable(cores.map(_piece_digests, stretches)), self.update.tensors)
        if got != self.update.digest:
            raise WeightDigestMismatch(self.update.path, self.update.digest, got)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, without a copy; writing to one crashes the process. Raises WeightFileRefused."""
        with warnings.catch_warnings():  # torch warns that it has no read-only tensors
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            payload = torch.from_numpy(self.payload)
        for spec in self.update.tensors:
            end = spec.offset + spec.nbytes
            yield spec.name, payload[spec.offset : end].view(self._dtype(spec)).view(spec.shape)

    def _pieces(self) -> Iterator[Bytes]:
        for spec in self.update.tensors:
            end = spec.offset + spec.nbytes
            yield from (self.payload[start : min(start + _PIECE, end)] for start in range(spec.offset, end, _PIECE))
            yield self.payload[end : end + -end % ALIGNMENT]

    def _dtype(self, spec: TensorSpec) -> torch.dtype:
        dtype = DTYPES.get(spec.dtype)
        fits = 0 <= spec.offset <= spec.offset + spec.nbytes <= self.payload.nbytes and spec.offset % ALIGNMENT == 0
        if dtype is None or not fits or spec.nbytes != math.prod(spec.shape) * dtype.itemsize:
            raise WeightFileRefused(f"{self.update.path}: invalid description {spec}")
        return dtype


@contextmanager
def open_weights(update: WeightUpdate, mapping: FileMapping | None = None) -> Iterator[MappedWeights]:
    """Map the file of `update`, into a mapping kept for the next version, and lock out its publisher. Raises
    WeightFileRefused for a link or another user's, WeightDigestMismatch if it is too short or gone, and
    BlockingIOError."""
    with ExitStack() as stack:
        try:
            fd, size = stack.enter_context(open_existing(update.path))
        except FileNotFoundError:  # its publisher is dead, or someone has removed it
            raise WeightDigestMismatch(update.path, update.digest, "none: the file is not there") from None
        if size < update.nbytes:
            raise WeightDigestMismatch(update.path, update.digest, f"none: {size} of {update.nbytes} bytes")
        yield MappedWeights(update, (mapping or FileMapping(mmap.PROT_READ)).of(fd, update.nbytes))


def read_weights(update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and zero-copy tensors of a verified file; use them before the iterator ends (see :func:`open_weights`)."""
    with open_weights(update) as weights:
        weights.verify()
        yield from weights.tensors()


def read_payload(update: WeightUpdate) -> Bytes:
    """uint8 [nbytes] view of the verified payload, to send to another node before the next version is published."""
    with open_weights(update) as weights:
        weights.verify()
        return weights.payload


def write_payload(update: WeightUpdate, payload: Bytes) -> None:
    """Write the file of `update` on this node from its bytes. The caller removes the file. Raises ValueError if
    `payload` has the wrong size, and WeightFileRefused if the path is not a weight file's."""
    path = Path(update.path)
    if payload.nbytes != update.nbytes:
        raise ValueError(f"received {payload.nbytes} bytes of weights, expected {update.nbytes}")
    check_name(path)
    with open_for_writing(path) as fd, _cores() as cores:
        writer = _PayloadWriter(fd, path, NOTHING, cores)
        writer.append(payload)
        writer.flush()


def change_payload(update: WeightUpdate, delta: Bytes) -> None:
    """Turn the previous version's file into that of `update`, in place, for engines to verify. Raises DeltaRefused
    if the delta does not fit, OSError if the file is gone or read, WeightFileRefused for a bad path, a link or
    another user's."""
    path = Path(update.path)
    check_name(path)
    with open_existing(path, change=True) as (fd, size):
        if size < update.nbytes:
            raise DeltaRefused(f"{path} has {size} of {update.nbytes} bytes")
        apply_delta(delta, FileMapping(mmap.PROT_READ | mmap.PROT_WRITE).of(fd, update.nbytes))


class _PayloadWriter:
    """Appends to an open file and hashes at the same time, so that the bytes cross the memory bus once."""

    def __init__(
        self, fd: int, path: Path, mapped: Bytes, cores: Executor, changes: ChangedWords | None = None
    ) -> None:
        """The beginning of the file is `mapped` for writing: copying takes two thirds of the time of a write."""
        self._changes = changes
        self._fd = fd
        self._path = path
        self._mapped = mapped
        self._cores = cores
        self._stretch: list[tuple[Bytes, int]] = []
        self._stretch_bytes = 0
        self._under_way: deque[Future[list[bytes]]] = deque()
        self.size = 0
        self.digests: list[bytes] = []
        """Digests of all written pieces, in order."""

    def append(self, data: Bytes) -> None:
        """Write `data`, valid until `flush`, and zeros up to a multiple of ALIGNMENT. Raises OSError."""
        for start in range(0, data.nbytes, _PIECE):
            self._append(data[start : start + _PIECE])
        self._append(np.zeros(-self.size % ALIGNMENT, np.uint8))

    def flush(self) -> None:
        """Wait until everything is in the file. Raises OSError if a write failed."""
        self._hand_over()
        while self._under_way:
            self.digests += self._under_way.popleft().result()

    def _append(self, piece: Bytes) -> None:
        self._stretch.append((piece, self.size))
        self._stretch_bytes += piece.nbytes
        self.size += piece.nbytes
        if self._stretch_bytes >= _STRETCH:
            self._hand_over()

    def _hand_over(self) -> None:
        while len(self._under_way) > torch.get_num_threads():  # limits the memory of what is queued
            self.digests += self._under_way.popleft().result()
        self._under_way.append(self._cores.submit(self._hash_and_write, self._stretch))
        self._stretch, self._stretch_bytes = [], 0

    def _hash_and_write(self, stretch: Sequence[tuple[Bytes, int]]) -> list[bytes]:
        digests: list[bytes] = []
        for piece, start in stretch:
            digests.append(xxhash.xxh3_128_digest(piece.data))
            if self._changes is not None and start % ALIGNMENT == 0:  # other pieces are padding
                self._changes.compare(start, self._mapped[start : start + piece.nbytes], piece)
            self._write(piece, start)
        return digests

    def _write(self, data: Bytes, start: int) -> None:
        copied = max(0, min(data.nbytes, self._mapped.nbytes - start))
        self._mapped[start : start + copied] = data[:copied]
        start, rest = start + copied, data.data[copied:]
        while rest:
            try:
                written = os.pwrite(self._fd, rest, start)
            except OSError as error:
                raise OSError(error.errno, f"cannot write weights: {error.strerror}", str(self._path)) from error
            start, rest = start + written, rest[written:]


def _host_bytes(tensor: torch.Tensor) -> Bytes:
    """uint8 [nbytes] of a tensor on any device, without a copy if it is contiguous in host memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy()


def _piece_digests(pieces: Iterable[Bytes]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(piece.data) for piece in pieces]


def _digest(pieces: Iterable[bytes], specs: Sequence[TensorSpec]) -> str:
    description = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]
    return xxhash.xxh3_128_hexdigest(b"".join([*pieces, json.dumps(description).encode()]))


def _cores() -> ThreadPoolExecutor:
    """A pool with as many threads as torch has; hashing and copying release the interpreter lock."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="weights")

"""One version of the policy's weights as a file in shared memory: written once, verified, mapped by every engine.

The payload is the raw bytes of all tensors one after another, each at a multiple of 64 bytes, gaps zero. Every tensor
is cut into pieces of a MiB, which all cores copy and hash side by side. The digest is xxh3-128 over the pieces' digests
followed by the names, types and shapes. One file serves all versions: its pages stay warm and mapped, and writing to
fresh shared memory costs several times as much.

A publisher that finds a reader still at the previous version leaves that file to it and goes on in a new one of the
same name (`shared_file.py`).
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
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import xxhash

from workers.messages import TensorSpec, WeightUpdate
from workers.shared_file import (
    NOTHING,
    Bytes,
    FileMapping,
    WeightFileRefused,
    check_name,
    new_path,
    open_for_reading,
    open_for_writing,
    remove_at_death,
    remove_stale,
    retire,
)

ALIGNMENT = 64
_PIECE = 1 << 20  # hashed and written while it is in the core's cache
_STRETCH = 16 * _PIECE  # for one thread at a time: handing a piece over costs as much as hashing it
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
NamedTensors = Iterable[tuple[str, torch.Tensor]]
WeightSource = NamedTensors | Callable[[], NamedTensors]
"""Names and tensors that can be iterated once per version, or a function that gives them."""


class WeightDigestMismatch(RuntimeError):
    """The weights that arrived are not the ones that were published."""

    def __init__(self, name: str, expected: str, got: str) -> None:
        """`name`: the file or the engine; `expected`, `got`: digests, or what is there instead of one."""
        super().__init__(name, expected, got)
        self.name, self.expected, self.got = name, expected, got

    def __str__(self) -> str:
        return f"{self.name}: weights have digest {self.got}, published was {self.expected}"


class WeightPublisher:
    """Writes each version of `source` into one reused file."""

    def __init__(
        self, source: WeightSource, directory: Path, run_id: str, writes: bool = True, lasting: bool = False
    ) -> None:
        """`source` is iterated once per version and decides what is sent: a tied weight must come once, under one name.

        Where iterating is a collective (ZeRO-3 gathers parameter by parameter), every rank has a publisher and all but
        one have `writes=False`: those iterate and write nothing. With `lasting` the tensors stay as they are when the
        next one is asked for, and the cores write several side by side. Files that dead processes of the same run left
        behind are removed.

        Raises ValueError where `run_id` cannot be part of a file name.
        """
        self._source = source
        self._path = new_path(directory, run_id)
        self._writes = writes
        self._lasting = lasting
        self._mapping = FileMapping(mmap.PROT_READ | mmap.PROT_WRITE)
        if writes:
            remove_stale(directory, run_id)
            remove_at_death(self._path)

    def publish(self, version: int) -> WeightUpdate | None:
        """Write all tensors; returns their layout and digest (None where this rank only iterates).

        Raises ValueError for an empty source or a name that comes twice, OSError (with the path) where the file cannot
        be written.
        """
        source = self._source() if callable(self._source) else self._source
        if not self._writes:
            for _ in source:
                pass
            return None
        specs: list[TensorSpec] = []
        names: set[str] = set()
        with open_for_writing(self._path) as fd, _cores() as cores:
            mapped = self._mapping.of(fd, os.fstat(fd).st_size)
            payload = _PayloadWriter(fd, self._path, mapped, cores)
            for name, tensor in source:
                if name in names:
                    raise ValueError(f"{name} comes twice from the weight source")
                names.add(name)
                data = _host_bytes(tensor)
                dtype = str(tensor.dtype).removeprefix("torch.")
                specs.append(TensorSpec(name, dtype, tuple(tensor.shape), payload.size, data.nbytes))
                payload.append(data)
                if not self._lasting:
                    payload.flush()
            payload.flush()
        if not specs:
            raise ValueError("the weight source is empty (is it an iterator that was used up?)")
        digest = _digest(payload.digests, specs)
        return WeightUpdate(version, digest, str(self._path), socket.gethostname(), tuple(specs), payload.size)

    def close(self) -> None:
        """Remove the file; engines that have it mapped keep their view."""
        self._mapping.drop()
        if self._writes:
            retire(self._path)


class MappedWeights:
    """A weight file, mapped read-only. Nothing is trusted before :meth:`verify`."""

    def __init__(self, update: WeightUpdate, payload: Bytes) -> None:
        """`payload`: [update.nbytes] view of the mapping, which lives as long as any view of it."""
        self.update = update
        self.payload = payload

    def verify(self) -> None:
        """Raise :class:`WeightDigestMismatch` unless payload and description are what was published.

        Raises :class:`WeightFileRefused` for a description that does not fit the payload.
        """
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
        """Names and tensors, without a copy; writing to one would crash the process.

        Raises :class:`WeightFileRefused` for a description that does not fit the payload.
        """
        with warnings.catch_warnings():  # torch has no read-only tensors and says so
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
        dtype = _DTYPES.get(spec.dtype)
        fits = 0 <= spec.offset <= spec.offset + spec.nbytes <= self.payload.nbytes and spec.offset % ALIGNMENT == 0
        if dtype is None or not fits or spec.nbytes != math.prod(spec.shape) * dtype.itemsize:
            raise WeightFileRefused(f"{self.update.path}: impossible description {spec}")
        return dtype


@contextmanager
def open_weights(update: WeightUpdate, mapping: FileMapping | None = None) -> Iterator[MappedWeights]:
    """Map the file of `update` and keep its publisher out until the context ends.

    With `mapping` (for reading) the file stays mapped for the next version.

    Raises :class:`WeightFileRefused` for a link or a file of somebody else, :class:`WeightDigestMismatch` for one that
    is too short, FileNotFoundError, and BlockingIOError where the publisher is writing it.
    """
    with open_for_reading(update.path) as (fd, size):
        if size < update.nbytes:
            raise WeightDigestMismatch(update.path, update.digest, f"none: {size} of {update.nbytes} bytes")
        yield MappedWeights(update, (mapping or FileMapping(mmap.PROT_READ)).of(fd, update.nbytes))


def verify(update: WeightUpdate) -> None:
    """Raise :class:`WeightDigestMismatch` unless the file holds what was published (see :func:`open_weights`)."""
    with open_weights(update) as weights:
        weights.verify()


def read_weights(update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and zero-copy tensors of a verified file; use them before the iterator ends (see :func:`open_weights`)."""
    with open_weights(update) as weights:
        weights.verify()
        yield from weights.tensors()


def read_payload(update: WeightUpdate) -> Bytes:
    """[nbytes] view of the verified payload, to be sent to another node before the next version is published."""
    with open_weights(update) as weights:
        weights.verify()
        return weights.payload


def write_payload(update: WeightUpdate, payload: Bytes) -> None:
    """Make the file of `update` on this node from its bytes. Whoever calls this removes the file in the end.

    Raises ValueError where `payload` has the wrong size, :class:`WeightFileRefused` for a path that is not a weight
    file's.
    """
    path = Path(update.path)
    if payload.nbytes != update.nbytes:
        raise ValueError(f"{payload.nbytes} bytes of weights came, {update.nbytes} were announced")
    check_name(path)
    with open_for_writing(path) as fd, _cores() as cores:
        writer = _PayloadWriter(fd, path, NOTHING, cores)
        writer.append(payload)
        writer.flush()


class _PayloadWriter:
    """Appends to an open file and hashes on the way, so that the bytes cross the memory bus once."""

    def __init__(self, fd: int, path: Path, mapped: Bytes, cores: Executor) -> None:
        """`mapped`: the file's beginning, for writing: a copy into it takes two thirds of the time of a write."""
        self._fd = fd
        self._path = path
        self._mapped = mapped
        self._cores = cores
        self._stretch: list[tuple[Bytes, int]] = []
        self._stretch_bytes = 0
        self._under_way: deque[Future[list[bytes]]] = deque()
        self.size = 0
        self.digests: list[bytes] = []
        """Of all pieces that were written, in order."""

    def append(self, data: Bytes) -> None:
        """Write `data`, which must stay until :meth:`flush`, and zeros up to the next multiple of ALIGNMENT.

        Raises OSError, for what was appended before, too.
        """
        for start in range(0, data.nbytes, _PIECE):
            self._append(data[start : start + _PIECE])
        self._append(np.zeros(-self.size % ALIGNMENT, np.uint8))

    def flush(self) -> None:
        """Return when everything lies in the file. Raises OSError."""
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
        while len(self._under_way) > torch.get_num_threads():  # what waits is kept in memory
            self.digests += self._under_way.popleft().result()
        self._under_way.append(self._cores.submit(self._hash_and_write, self._stretch))
        self._stretch, self._stretch_bytes = [], 0

    def _hash_and_write(self, stretch: Sequence[tuple[Bytes, int]]) -> list[bytes]:
        digests: list[bytes] = []
        for piece, start in stretch:
            digests.append(xxhash.xxh3_128_digest(piece.data))
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
    """[nbytes] bytes of a tensor on any device, without a copy where it is contiguous in host memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy()


def _piece_digests(pieces: Iterable[Bytes]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(piece.data) for piece in pieces]


def _digest(pieces: Iterable[bytes], specs: Sequence[TensorSpec]) -> str:
    description = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]
    return xxhash.xxh3_128_hexdigest(b"".join([*pieces, json.dumps(description).encode()]))


def _cores() -> ThreadPoolExecutor:
    """As many threads as torch has in this process; hashing and copying let go of the interpreter."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="weights")

"""The changes between two versions of the weights, as a compressed stream that turns one payload into the other.

After a small update most bfloat16 weights round to the value they had, and the others move by a step or two of the
format. A delta has, for each changed 16-bit word of the payload, the distance from the changed word before it and the
difference of the two values: exact for every type, because it is the difference of bits. Both are split into planes of
bytes, mostly nearly constant, and compressed by Arrow (zstd).

A delta names the digest of the version that it starts from. Applied to anything else it gives other bytes: the result
is verified against the digest of the new version before any engine loads it, like every payload.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from troupe.workers.weights.shared_memory import NOTHING, Bytes

WORD = np.dtype("<u2")
DENSE_SHARE = 1 / 32
"""Share of changed words above which the whole payload is sent. An estimate from the processor time of the steps: about
here, encoding and applying take as long as sending and writing everything at 10 Gbit/s."""
_LEAST_WORDS = 1 << 20
"""Words that are compared before a share counts."""
_SAMPLED = 16
"""One in so many stretches of `_STRETCH` bytes is compared if all weights are expected to travel: a sixteenth of the
time to compare them."""
_STRETCH = 1 << 20
_SPAN = 1 << 24
"""Words that one batch covers: a distance within it has three bytes."""
_DIGEST_BYTES = 16
_GAPS, _STEPS = ("gap0", "gap1", "gap2"), ("step0", "step1")
_SCHEMA = pa.schema([(name, pa.uint8()) for name in (*_GAPS, *_STEPS)])


class DeltaRefused(ValueError):
    """A delta does not fit the payload, or is no delta."""


@dataclass(frozen=True)
class _Part:
    """The changed words of one piece of the payload."""

    start: int
    """First word of the piece."""
    places: npt.NDArray[np.uint32]
    """Changed words, counted from `start`."""
    steps: npt.NDArray[np.uint16]
    """New minus old bits, modulo 2^16."""


class ChangedWords:
    """Collects what differs, piece by piece and from several threads, until it is too much; if that is expected,
    only a sample is compared, which shows whether to expect it the next time."""

    def __init__(self, base: str, expect_dense: bool = False) -> None:
        """`base`: digest of the old version. If `expect_dense`, there is no delta, but a share of changed words."""
        self._base = base
        self._sampled = expect_dense
        self._parts: list[_Part] = []
        self._lock = threading.Lock()
        self._compared = 0
        self._changed = 0
        self._given_up = False

    @property
    def dense(self) -> bool:
        """Whether enough of the compared words changed that all weights should travel."""
        return self._changed > DENSE_SHARE * max(self._compared, _LEAST_WORDS // (_SAMPLED if self._sampled else 1))

    def give_up(self) -> None:
        """Stop collecting: there will be no delta."""
        self._given_up = True
        self._parts = []

    def compare(self, start: int, old: Bytes, new: Bytes) -> None:
        """Collect what differs in a piece at an even offset of the payload; an odd last byte is followed by padding."""
        if self._given_up or (self._sampled and start // _STRETCH % _SAMPLED):
            return
        if old.nbytes != new.nbytes:
            self.give_up()
            return
        before, after = _words(old), _words(new)
        changed = before != after
        count = int(np.count_nonzero(changed))
        with self._lock:
            self._compared += changed.size
            self._changed += count
        if self._sampled:
            return
        if self.dense:
            self.give_up()
        elif count:
            places = np.flatnonzero(changed)
            steps = after[places] - before[places]
            self._parts.append(_Part(start // WORD.itemsize, places.astype(np.uint32), steps))

    def encode(self, nbytes: int) -> Bytes:
        """The delta of a payload; empty if it was given up, is a sample, or is not smaller than half of it."""
        if self._given_up or self._sampled:
            return NOTHING
        schema = _SCHEMA.with_metadata({"base": self._base, "nbytes": str(nbytes)})
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
        with pa.ipc.new_stream(sink, schema, options=options) as writer:
            for parts in _grouped(sorted(self._parts, key=lambda part: part.start)):
                start, columns = parts[0].start, _planes(parts)
                batch = pa.record_batch([pa.array(column) for column in columns], schema=schema)
                writer.write_batch(batch, custom_metadata={"start": str(start)})
        stream = sink.getvalue()
        encoded = np.concatenate([_digest(stream), np.frombuffer(stream, np.uint8)])
        return encoded if encoded.nbytes < nbytes // 2 else NOTHING


def base_of(delta: Bytes) -> str:
    """Digest of the version that a delta starts from. Raises DeltaRefused if it is no delta, or is damaged."""
    return _header(_open(delta))[0]


def apply_delta(delta: Bytes, payload: Bytes) -> None:
    """Change the payload of the base, in place, into the new version's. The caller verifies the result. Raises
    DeltaRefused if it is no delta, is damaged, or is for a payload of another size."""
    reader = _open(delta)
    nbytes = _header(reader)[1]
    if nbytes != payload.nbytes or nbytes % WORD.itemsize:
        raise DeltaRefused(f"the delta is for {nbytes} bytes, the payload has {payload.nbytes}")
    words = payload.view(WORD)
    for batch, metadata in reader.iter_batches_with_custom_metadata():
        places, steps = _read(batch)
        words[int(metadata["start"]) :][places] += steps


def _words(data: Bytes) -> npt.NDArray[np.uint16]:
    if data.nbytes % WORD.itemsize:
        data = np.append(data, np.uint8(0))
    return data.view(WORD)


def _grouped(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """The parts in order, in groups that each lie within one span."""
    group: list[_Part] = []
    for part in parts:
        if group and part.start + int(part.places[-1]) - group[0].start >= _SPAN:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _planes(parts: Sequence[_Part]) -> list[npt.NDArray[np.uint8]]:
    """The columns of one batch: distances, and zigzag-coded differences, by byte, the lowest first."""
    first = parts[0].start
    places = np.concatenate([part.places + np.uint32(part.start - first) for part in parts])
    gaps = np.diff(places, prepend=np.uint32(0))
    steps = np.concatenate([part.steps for part in parts]).view(np.int16)
    zigzag = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    planes = [(gaps >> shift).astype(np.uint8) for shift in (0, 8, 16)]
    return [*planes, zigzag.astype(np.uint8), (zigzag >> 8).astype(np.uint8)]


def _read(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """(places from the batch's start, differences): the inverse of `_planes`."""
    columns = [column.to_numpy() for column in batch.columns]
    gaps = sum(plane.astype(np.uint32) << shift for plane, shift in zip(columns[:3], (0, 8, 16), strict=True))
    zigzag = columns[3].astype(np.uint16) | (columns[4].astype(np.uint16) << 8)
    steps = (zigzag >> 1) ^ (-(zigzag & 1).astype(np.int16)).view(np.uint16)
    return np.cumsum(gaps, dtype=np.uint32), steps


def _digest(stream: pa.Buffer) -> Bytes:
    return np.frombuffer(xxhash.xxh3_128_digest(stream), np.uint8)


def _open(delta: Bytes) -> pa.RecordBatchStreamReader:
    """The stream behind its own digest: Arrow must not read a damaged one."""
    stream = pa.py_buffer(delta[_DIGEST_BYTES:])
    if not np.array_equal(_digest(stream), delta[:_DIGEST_BYTES]):
        raise DeltaRefused("the delta is damaged, or is no delta")
    return pa.ipc.open_stream(stream)


def _header(reader: pa.RecordBatchStreamReader) -> tuple[str, int]:
    """(digest of the base, size of the payload)."""
    found: dict[bytes, bytes] = reader.schema.metadata
    return found[b"base"].decode(), int(found[b"nbytes"])

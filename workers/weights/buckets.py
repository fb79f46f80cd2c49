"""Weights cut into buckets for transfers from device to device, and their checksums.

A bucket is a uint8 buffer that holds consecutive tensors, each aligned to 64 bytes, with zeros in the gaps, so that
tensors of different types share it. A tensor above the limit has its own bucket. Sender and receivers compute the same
buckets from names, types and shapes alone, and the same checksums on their own device from the bytes that they hold.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from troupe.workers.contract.messages import TensorSpec
from troupe.workers.models.digests import checksum
from troupe.workers.weights.file import ALIGNMENT, DTYPES

BUCKET_BYTES = 256 * 2**20
"""Limit of a bucket; with 256 MiB, the time of a transfer no longer depends on the number of buckets."""
Shape = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, type and whole shape of a tensor."""


@dataclass(frozen=True)
class Bucket:
    """The layout of one bucket."""

    tensors: tuple[TensorSpec, ...]
    """Their offsets are within the bucket."""
    nbytes: int


def buckets_of(shapes: Sequence[Shape], limit: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The tensors in order, in buckets of at most `limit` bytes each. Raises ValueError if a type cannot be sent."""
    buckets: list[Bucket] = []
    held: list[TensorSpec] = []
    size = 0
    for name, dtype, shape in shapes:
        kind = str(dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise ValueError(f"{name} has type {kind}, which cannot be sent")
        nbytes = math.prod(shape) * dtype.itemsize
        padded = nbytes + -nbytes % ALIGNMENT
        if held and size + padded > limit:
            buckets.append(Bucket(tuple(held), size))
            held, size = [], 0
        held.append(TensorSpec(name, kind, tuple(shape), size, nbytes))
        size += padded
    return (*buckets, Bucket(tuple(held), size)) if held else tuple(buckets)


def pack(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's tensors into the buffer; returns uint8 [bucket.nbytes]. Raises ValueError."""
    packed = buffer[: bucket.nbytes]
    for spec in bucket.tensors:
        name, tensor = next(tensors, ("", None))
        if tensor is None or (name, _kind(tensor), tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
            found = "nothing" if tensor is None else f"{name} {_kind(tensor)} {tuple(tensor.shape)}"
            raise ValueError(f"the weights do not match their layout: {spec.name} is to be sent, the next is {found}")
        end = spec.offset + spec.nbytes
        packed[spec.offset : end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        packed[end : end + -end % ALIGNMENT].zero_()
    return packed


def unpack(bucket: Bucket, packed: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a bucket, as views of its bytes, uint8 [bucket.nbytes]."""
    return [
        (spec.name, packed[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape))
        for spec in bucket.tensors
    ]


def checksums(bucket: Bucket, packed: torch.Tensor) -> torch.Tensor:
    """int64 [tensors, 2], modulo 2^64: the sum of the 32-bit words of each tensor in uint8 [bucket.nbytes], and the
    sum weighted by their positions, computed on their device. They detect faults of the transfer, not an attack."""
    words = packed.view(torch.int32)
    bounds = [*(spec.offset // 4 for spec in bucket.tensors), bucket.nbytes // 4]
    sums = [checksum(words[start:end]) for start, end in itertools.pairwise(bounds)]
    return torch.stack(sums)


def weights_digest(buckets: Sequence[Bucket], sums: Sequence[torch.Tensor]) -> str:
    """Digest of names, types, shapes and `checksums` of all buckets."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([[s.name, s.dtype, s.shape] for bucket in buckets for s in bucket.tensors]).encode())
    digest.update(torch.cat([part.cpu() for part in sums]).numpy().tobytes() if sums else b"")
    return digest.hexdigest()


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

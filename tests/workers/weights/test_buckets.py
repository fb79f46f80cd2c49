"""Weights in buckets: layout, round trip, and checksums that see every change of the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from troupe.workers.weights.buckets import Bucket, Shape, buckets_of, checksums, pack, unpack, weights_digest
from troupe.workers.weights.file import ALIGNMENT

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
shape_lists = st.lists(
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=12
)


def weights(drawn: Sequence[tuple[torch.dtype, list[int]]], seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Random bytes of these types and shapes."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, (dtype, shape) in enumerate(drawn):
        data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        found.append((f"w{number}", data.view(dtype).view(shape)))
    return found


def shapes(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Shape]:
    """Their description."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def packed(buckets: Sequence[Bucket], tensors: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """All buckets, in buffers that were not empty before."""
    items = iter(tensors)
    return [pack(bucket, items, torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8)) for bucket in buckets]


@given(shape_lists, st.integers(1, 6000))
def test_every_tensor_arrives_as_it_was(drawn: list[tuple[torch.dtype, list[int]]], limit: int) -> None:
    """Types may be mixed, with odd numbers of elements, and a tensor may exceed the limit."""
    sent = weights(drawn)
    buckets = buckets_of(shapes(sent), limit)
    arrived = [
        item for bucket, buffer in zip(buckets, packed(buckets, sent), strict=True) for item in unpack(bucket, buffer)
    ]
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, got), (_, expected) in zip(arrived, sent, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    for bucket in buckets:
        assert bucket.nbytes % ALIGNMENT == 0
        assert bucket.nbytes <= max(limit, *(spec.nbytes + ALIGNMENT for spec in bucket.tensors))


def test_the_checksums_are_those_of_the_definition() -> None:
    """Against plain Python integers, over several rows and a rest."""
    tensor = torch.randint(-(2**31), 2**31 - 1, (3 * 4096 + 37,), dtype=torch.int32)
    (bucket,) = buckets_of([("w", torch.int32, tuple(tensor.shape))])
    (buffer,) = packed([bucket], [("w", tensor)])
    words = tensor.tolist()

    def wrapped(total: int) -> int:
        return (total + 2**63) % 2**64 - 2**63

    expected = [wrapped(sum(words)), wrapped(sum(place * word for place, word in enumerate(words)))]
    assert checksums(bucket, buffer).tolist() == [expected]


@given(st.integers(0, 20_000), st.integers(0, 7), st.integers(0, 20_000))
def test_a_changed_bit_and_a_moved_word_change_the_digest(place: int, bit: int, other: int) -> None:
    sent = weights([(torch.bfloat16, [41, 200]), (torch.float32, [9, 111])])
    buckets = buckets_of(shapes(sent), 1)
    buffers = packed(buckets, sent)

    def digest() -> str:
        return weights_digest(buckets, [checksums(*pair) for pair in zip(buckets, buffers, strict=True)])

    before = digest()
    first = buffers[0]
    first[place % first.numel()] ^= 1 << bit
    assert digest() != before
    first[place % first.numel()] ^= 1 << bit
    words = first.view(torch.int32)
    one, two = place % words.numel(), other % words.numel()
    moved = words[[two, one]].clone()
    equal = bool(words[one] == words[two])
    words[[one, two]] = moved
    assert (digest() == before) == equal


def test_names_and_shapes_are_part_of_the_digest() -> None:
    zeros = torch.zeros(4, 6)
    found = set()
    for name, tensor in (("a", zeros), ("b", zeros), ("a", zeros.view(6, 4)), ("a", zeros.view(torch.int32))):
        (bucket,) = buckets_of(shapes([(name, tensor)]))
        (buffer,) = packed([bucket], [(name, tensor)])
        found.add(weights_digest([bucket], [checksums(bucket, buffer)]))
    assert len(found) == 4


def test_weights_that_do_not_match_their_layout_are_refused() -> None:
    (bucket,) = buckets_of([("a", torch.float32, (2,)), ("b", torch.float32, (3,))])
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"b is to be sent, the next is nothing"):
        pack(bucket, iter([("a", torch.zeros(2))]), buffer)
    with pytest.raises(ValueError, match=r"b is to be sent, the next is b float32 \(4,\)"):
        pack(bucket, iter([("a", torch.zeros(2)), ("b", torch.zeros(4))]), buffer)
    with pytest.raises(ValueError, match="c has type complex64, which cannot be sent"):
        buckets_of([("c", torch.complex64, (1,))])

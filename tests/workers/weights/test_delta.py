"""A delta turns one payload into another, bit for bit, or is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workers.contract.messages import WeightUpdate
from troupe.workers.weights import delta as deltas
from troupe.workers.weights.delta import ChangedWords, DeltaRefused, apply_delta, base_of
from troupe.workers.weights.file import (
    RankWeights,
    WeightDigestMismatch,
    WeightPublisher,
    change_payload,
    read_payload,
    write_payload,
)
from troupe.workers.weights.receiver import NodeFile
from troupe.workers.weights.shared_memory import Bytes, open_existing

MIB = 1 << 20


def encoded(old: Bytes, new: Bytes, piece: int = 4096) -> Bytes:
    """The delta between two payloads, compared in pieces that arrive in another order."""
    changes = ChangedWords("base")
    for start in reversed(range(0, old.nbytes, piece)):
        changes.compare(start, old[start : start + piece], new[start : start + piece])
    return changes.encode(old.nbytes)


def changed(old: Bytes, share: float, seed: int) -> Bytes:
    """The payload with this share of its words replaced by any others."""
    rng = np.random.default_rng(seed)
    words: npt.NDArray[np.uint16] = old.copy().view(np.uint16)
    chosen = rng.random(words.size) < share
    words[chosen] = rng.integers(0, 1 << 16, int(chosen.sum()), dtype=np.uint16)
    return words.view(np.uint8)


@given(
    words=st.integers(1, 50_000),
    share=st.sampled_from([0.0, 1e-4, 0.01, 0.1]),
    piece=st.sampled_from([64, 4096, 1 << 20]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_what_a_delta_makes_of_the_base_is_the_new_payload(words: int, share: float, piece: int, seed: int) -> None:
    old = np.random.default_rng(seed).integers(0, 256, 2 * words, dtype=np.uint8)
    new = changed(old, share, seed + 1)
    delta = encoded(old, new, piece)
    if not delta.nbytes:  # not smaller: small payloads have fewer bytes than a stream's header
        assert words < 10_000 or share == 0.1
        return
    assert delta.nbytes < old.nbytes and base_of(delta) == "base"
    patched = old.copy()
    apply_delta(delta, patched)
    assert np.array_equal(patched, new)


@pytest.mark.parametrize("step", [1, -1, 127, -128, 32767, -32768])
def test_every_difference_of_two_words_is_exact(step: int) -> None:
    old = np.arange(1 << 16, dtype=np.uint16).repeat(40)
    new = old.copy()
    new[::40] += np.uint16(step & 0xFFFF)
    patched = old.copy().view(np.uint8)
    apply_delta(encoded(old.view(np.uint8), new.view(np.uint8), MIB), patched)
    assert np.array_equal(patched.view(np.uint16), new)


def test_changes_far_from_each_other_are_in_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distance has three bytes; beyond them a batch says where it starts."""
    monkeypatch.setattr(deltas, "_SPAN", 1 << 12)
    old = np.zeros(1 << 17, np.uint8)
    new = old.copy()
    new[[0, 1, 9_000, 70_001, old.size - 1]] = 7
    delta, patched = encoded(old, new), old.copy()
    apply_delta(delta, patched)
    assert np.array_equal(patched, new)


def test_an_update_that_changes_much_has_no_delta() -> None:
    old = np.zeros(8 * MIB, np.uint8)
    assert not encoded(old, changed(old, 0.6, 1), MIB).nbytes
    assert encoded(old, changed(old, 0.02, 1), MIB).nbytes


@pytest.mark.parametrize(("share", "dense"), [(0.0, False), (0.02, False), (0.05, True), (0.6, True)])
def test_a_sample_tells_whether_all_weights_should_travel(
    share: float, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = np.zeros(48 * MIB, np.uint8)
    new = changed(old, share, 1)
    changes, pieces = ChangedWords("base", expect_dense=True), list[int]()
    words = deltas._words
    monkeypatch.setattr(deltas, "_words", lambda data: pieces.append(data.nbytes) or words(data))
    for start in range(0, old.nbytes, MIB):
        changes.compare(start, old[start : start + MIB], new[start : start + MIB])
    assert sum(pieces) == 2 * 3 * MIB  # of both versions
    assert changes.dense is dense and not changes.encode(old.nbytes).nbytes


@pytest.mark.parametrize("step", [1, -1])
def test_small_steps_at_one_per_cent_take_a_fiftieth(step: int) -> None:
    """Most weights that change in bfloat16 move by one step of the format."""
    rng = np.random.default_rng(3)
    old = (rng.standard_normal(1 << 20).astype(np.float32) * 0.03).view(np.uint32) >> 16
    new = old.astype(np.uint16)
    new[rng.random(new.size) < 0.01] += np.uint16(step & 0xFFFF)
    before = old.astype(np.uint16).view(np.uint8)
    assert encoded(before, new.view(np.uint8), MIB).nbytes * 50 < before.nbytes


def test_a_delta_for_another_payload_is_refused() -> None:
    old = np.zeros(64 * 1024, np.uint8)
    delta = encoded(old, changed(old, 0.01, 1))
    with pytest.raises(DeltaRefused, match="the delta is for 65536 bytes, the payload has 65600"):
        apply_delta(delta, np.zeros(65_600, np.uint8))


@given(at=st.integers(0, 1 << 20), value=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_damaged_delta_is_refused_before_it_is_read(at: int, value: int) -> None:
    old = np.zeros(16 * 1024, np.uint8)
    delta = encoded(old, changed(old, 0.02, 1)).copy()
    delta[at % delta.nbytes] ^= np.uint8(value)
    with pytest.raises(DeltaRefused, match="damaged"):
        apply_delta(delta, old)
    assert not old.any()


@pytest.mark.parametrize("nothing", [b"", b"no delta", bytes(4096)])
def test_what_is_no_delta_is_refused(nothing: bytes) -> None:
    with pytest.raises(DeltaRefused):
        base_of(np.frombuffer(nothing, np.uint8))


class Trainer:
    """Weights in several types, of which an update changes a few; and a node elsewhere with a separate file."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            "wide": torch.randn(300, 4001, generator=generator).to(torch.bfloat16),
            "odd": torch.arange(9001).to(torch.uint8),
            "single": torch.randn(5000, generator=generator),
            "empty": torch.zeros(0, 3),
        }
        shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        weights = RankWeights(self.tensors.items, shapes, rank=0, gathers=False)
        (folder / "here").mkdir()
        (folder / "far").mkdir()
        self.publisher: WeightPublisher = weights.publisher(folder / "here", "test")
        self.far = folder / "far"
        self.version = 0

    def publish(self, base: str = "") -> WeightUpdate:
        """The next version."""
        self.version += 1
        update = self.publisher.publish(self.version, base)
        assert update is not None
        return update

    def step(self) -> None:
        """A small update."""
        self.tensors["wide"].view(-1).view(torch.int16)[::101] += 1
        self.tensors["odd"][-1] += 1
        self.tensors["single"][17] *= 1.5

    def elsewhere(self, update: WeightUpdate) -> WeightUpdate:
        """The update as the other node sees it."""
        return replace(update, path=str(self.far / Path(update.path).name))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A publisher and another node."""
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.publisher.close()


def test_a_node_that_has_the_version_before_makes_the_next_one_from_what_changed(trainer: Trainer) -> None:
    before = update = trainer.publish()
    write_payload(trainer.elsewhere(update), read_payload(update))
    for _ in range(3):
        before = update
        trainer.step()
        update = trainer.publish(before.digest)
        delta = trainer.publisher.delta(update)
        assert 0 < delta.nbytes * 10 < update.nbytes and base_of(delta) == before.digest
        change_payload(trainer.elsewhere(update), delta)
        read_payload(trainer.elsewhere(update))
    assert update.digest != before.digest


def test_a_delta_applied_to_another_version_is_found_before_loading(trainer: Trainer) -> None:
    first = trainer.publish()
    write_payload(trainer.elsewhere(first), read_payload(first))
    trainer.step()
    second = trainer.publish(first.digest)
    trainer.step()
    third = trainer.publish(second.digest)
    change_payload(trainer.elsewhere(third), trainer.publisher.delta(third))
    with pytest.raises(WeightDigestMismatch):
        read_payload(trainer.elsewhere(third))


def test_a_worker_changes_a_file_only_if_it_is_the_base_of_the_delta(trainer: Trainer) -> None:
    first = trainer.publish()
    payload = read_payload(first).copy()
    trainer.step()
    second = trainer.publish(first.digest)
    delta, elsewhere = trainer.publisher.delta(second), trainer.elsewhere(second)

    async def changed(held: WeightUpdate, check: Callable[[WeightUpdate], object] = lambda _: None) -> bool:
        with closing(NodeFile("rollout-0")) as file:
            await file.write(trainer.elsewhere(held), payload)
            done = await file.change(elsewhere, delta)
            check(elsewhere)
            return done

    assert not asyncio.run(changed(replace(first, digest="another")))
    assert asyncio.run(changed(first, read_payload))


def _other_base(trainer: Trainer, update: WeightUpdate) -> str:
    return "another digest"


def _other_layout(trainer: Trainer, update: WeightUpdate) -> str:
    trainer.tensors["wide"] = trainer.tensors["wide"].reshape(4001, 300)
    return update.digest


def _other_size(trainer: Trainer, update: WeightUpdate) -> str:
    trainer.tensors["single"] = torch.zeros(4999)
    return update.digest


def _failed_since(trainer: Trainer, update: WeightUpdate) -> str:
    kept = trainer.tensors.pop("single")
    trainer.tensors["broken"] = torch.zeros(3, dtype=torch.complex64)
    trainer.tensors["wide"] = trainer.tensors.pop("wide")
    trainer.tensors.clear()
    with pytest.raises(ValueError, match="empty"):
        trainer.publish()
    trainer.tensors["single"] = kept
    return update.digest


def _much(trainer: Trainer, update: WeightUpdate) -> str:
    trainer.tensors["wide"] *= 1.5
    return update.digest


def _small(trainer: Trainer, update: WeightUpdate) -> str:
    trainer.step()
    return update.digest


@pytest.mark.parametrize("cause", [_other_base, _other_layout, _other_size, _failed_since, _much])
def test_without_a_base_or_with_too_much_there_is_no_delta(
    trainer: Trainer, cause: Callable[[Trainer, WeightUpdate], str]
) -> None:
    update = trainer.publish()
    update = trainer.publish(cause(trainer, update))
    assert not trainer.publisher.delta(update).nbytes
    read_payload(update)


def test_after_large_updates_a_sample_of_a_small_one_brings_deltas_back(trainer: Trainer) -> None:
    """One version late: the first small update travels whole."""
    update, sizes = trainer.publish(), list[int]()
    for change in (_much, _much, _small, _small, _small):
        update = trainer.publish(change(trainer, update))
        sizes.append(trainer.publisher.delta(update).nbytes)
    assert [size > 0 for size in sizes] == [False, False, False, True, True]
    read_payload(update)


def test_a_file_that_a_reader_held_is_written_anew_and_has_no_delta(trainer: Trainer) -> None:
    first = trainer.publish()
    trainer.step()
    with open_existing(first.path):
        second = trainer.publish(first.digest)
    assert not trainer.publisher.delta(second).nbytes
    read_payload(second)


def test_only_the_last_version_has_a_delta(trainer: Trainer) -> None:
    first = trainer.publish()
    trainer.step()
    second = trainer.publish(first.digest)
    trainer.step()
    third = trainer.publish(second.digest)
    assert not trainer.publisher.delta(second).nbytes
    assert trainer.publisher.delta(third).nbytes


def test_a_file_that_is_gone_or_read_or_too_short_is_not_changed(trainer: Trainer) -> None:
    first = trainer.publish()
    trainer.step()
    second = trainer.publish(first.digest)
    delta, elsewhere = trainer.publisher.delta(second), trainer.elsewhere(second)
    with pytest.raises(FileNotFoundError):
        change_payload(elsewhere, delta)
    write_payload(elsewhere, read_payload(second))
    with open_existing(elsewhere.path), pytest.raises(BlockingIOError):
        change_payload(elsewhere, delta)
    with Path(elsewhere.path).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DeltaRefused, match="has 100 of"):
        change_payload(elsewhere, delta)


def killed_between_batches(update: WeightUpdate, delta: Bytes) -> None:
    """Change a node's file and die of SIGKILL at the second batch."""
    read, batches = deltas._read, count(1)

    def deadly(batch: Any) -> Any:
        if next(batches) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(batch)

    deltas._read = deadly
    change_payload(update, delta)


def test_a_file_whose_writer_was_killed_within_a_delta_is_of_no_version_and_gets_all_weights(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "_SPAN", 1 << 12)
    first = trainer.publish()
    write_payload(trainer.elsewhere(first), read_payload(first))
    trainer.step()
    second = trainer.publish(first.digest)
    delta = np.array(trainer.publisher.delta(second))
    process = get_context("spawn").Process(target=killed_between_batches, args=(trainer.elsewhere(second), delta))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for version in (first, second):
        with pytest.raises(WeightDigestMismatch):
            read_payload(trainer.elsewhere(version))
    write_payload(trainer.elsewhere(second), read_payload(second))
    read_payload(trainer.elsewhere(second))
    trainer.step()
    third = trainer.publish(second.digest)
    change_payload(trainer.elsewhere(third), trainer.publisher.delta(third))
    read_payload(trainer.elsewhere(third))

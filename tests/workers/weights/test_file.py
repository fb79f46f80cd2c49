"""The shared-memory weight file: round trip, digest, reuse, refusal of foreign files."""

from __future__ import annotations

import dataclasses
import mmap
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workers.contract.messages import TensorSpec, WeightUpdate
from troupe.workers.weights import file as weight_file
from troupe.workers.weights.file import WeightDigestMismatch, WeightPublisher
from troupe.workers.weights.shared_memory import FileMapping, WeightFileRefused


class Weights:
    """A source that can be iterated again and whose tensors can be changed in between."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        yield from self.tensors.items()


def some_weights() -> Weights:
    """Odd sizes, several types, a scalar, an empty tensor, and a view that is not contiguous."""
    torch.manual_seed(0)
    return Weights(
        matrix=torch.randn(7, 13, dtype=torch.bfloat16),
        transposed=torch.randn(5, 3).t(),
        scalar=torch.tensor(2.5),
        empty=torch.empty(0, 4),
        counts=torch.arange(9),
        norm=torch.randn(1),
    )


def published(publisher: WeightPublisher, version: int) -> WeightUpdate:
    update = publisher.publish(version)
    assert update is not None
    return update


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(some_weights(), tmp_path, "run-1")
    yield publisher
    publisher.close()


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_published_tensors_are_read_back_unchanged(publisher: WeightPublisher) -> None:
    """Names, types, shapes and bits, each tensor aligned."""
    update = published(publisher, 3)
    read = dict(weight_file.read_weights(update))
    expected = some_weights().tensors
    assert list(read) == list(expected)
    for name, tensor in expected.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)
    assert all(spec.offset % weight_file.ALIGNMENT == 0 for spec in update.tensors)
    assert update.version == 3
    assert update.nbytes == os.path.getsize(update.path)
    assert update.nbytes == weight_file.weight_bytes((n, t.dtype, tuple(t.shape)) for n, t in expected.items())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.integers(0, 2**31 - 1))
def test_round_trip_over_nodes(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int) -> None:
    """The payload makes an equal file elsewhere, whatever the sizes."""
    generator = torch.Generator().manual_seed(seed)
    source = Weights(**{f"t{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)})
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    publisher = WeightPublisher(source, here, "run")
    update = published(publisher, 1)
    if update.nbytes:
        copy = dataclasses.replace(update, path=str(there / Path(update.path).name))
        weight_file.write_payload(copy, np.array(weight_file.read_payload(update)))
        publisher.close()
        for name, tensor in weight_file.read_weights(copy):
            assert torch.equal(tensor, source.tensors[name])


def test_one_private_file_serves_all_versions(publisher: WeightPublisher, tmp_path: Path) -> None:
    """Same inode, mode 0600; removed at close."""
    first = published(publisher, 1)
    inode = os.stat(first.path).st_ino
    second = published(publisher, 2)
    assert (second.path, os.stat(second.path).st_ino) == (first.path, inode)
    assert os.stat(second.path).st_mode & 0o777 == 0o600
    assert f"-run-1-{os.getpid()}-" in second.path
    publisher.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_a_smaller_version_in_a_used_file(tmp_path: Path) -> None:
    """Bytes that an earlier, larger version left after the payload and in its gaps are ignored."""
    source = Weights(a=torch.ones(1000), b=torch.ones(1000))
    publisher = WeightPublisher(source, tmp_path, "run")
    published(publisher, 1)
    source.tensors = {"a": torch.zeros(3), "b": torch.zeros(5)}
    reused = published(publisher, 2)
    fresh = published(WeightPublisher(source, tmp_path, "other"), 2)
    weight_file.read_payload(reused)
    assert reused.digest == fresh.digest


@settings(max_examples=30, deadline=None)
@given(versions=st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=3), min_size=2, max_size=5))
def test_versions_that_grow_and_shrink_in_one_file(
    tmp_path_factory: pytest.TempPathFactory, versions: list[list[int]]
) -> None:
    """A version goes partly into what the file holds already and partly behind it; each is whole, and its own."""
    source = Weights()
    publisher = WeightPublisher(source, tmp_path_factory.mktemp("files"), "run")
    for number, sizes in enumerate(versions, 1):
        source.tensors = {f"w{i}": torch.full((size,), float(number + i)) for i, size in enumerate(sizes)}
        update = published(publisher, number)
        assert all(torch.equal(tensor, source.tensors[name]) for name, tensor in weight_file.read_weights(update))
    publisher.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda u: dataclasses.replace(u, digest="0" * 32),
        lambda u: dataclasses.replace(u, tensors=(dataclasses.replace(u.tensors[0], name="x"), *u.tensors[1:])),
        lambda u: dataclasses.replace(u, tensors=(dataclasses.replace(u.tensors[0], shape=(13, 7)), *u.tensors[1:])),
        lambda u: dataclasses.replace(u, tensors=(dataclasses.replace(u.tensors[0], dtype="float16"), *u.tensors[1:])),
        lambda u: dataclasses.replace(u, tensors=u.tensors[:-1]),
    ],
    ids=["digest", "name", "shape", "dtype", "missing"],
)
def test_the_description_is_part_of_the_digest(publisher: WeightPublisher, change) -> None:
    """The right bytes under the wrong names are the wrong weights."""
    update = published(publisher, 1)
    with pytest.raises(WeightDigestMismatch):
        list(weight_file.read_weights(change(update)))


def test_every_flipped_byte_is_found(publisher: WeightPublisher) -> None:
    """Gaps included; flipping it back heals."""
    update = published(publisher, 1)
    for offset in range(0, update.nbytes, 7):
        flip(update.path, offset)
        with pytest.raises(WeightDigestMismatch) as caught:
            weight_file.read_payload(update)
        assert caught.value.expected == update.digest != caught.value.got
        flip(update.path, offset)
    weight_file.read_payload(update)


def test_truncated_file(publisher: WeightPublisher) -> None:
    """Refused before it is mapped (reading past its end would kill the process); the next version heals it."""
    update = published(publisher, 1)
    os.truncate(update.path, update.nbytes - 1)
    with pytest.raises(WeightDigestMismatch, match="none: "):
        weight_file.read_payload(update)
    weight_file.read_payload(published(publisher, 2))


def test_a_reader_keeps_its_version(publisher: WeightPublisher) -> None:
    """Publishing does not change a version that an engine is reading: it writes a new file of the same name."""
    first = published(publisher, 1)
    with weight_file.open_weights(first) as weights:
        before = {name: tensor.clone() for name, tensor in weights.tensors()}
        publisher._source = Weights(matrix=torch.zeros(7, 13, dtype=torch.bfloat16))
        second = published(publisher, 2)
        weights.verify()
        for name, tensor in weights.tensors():
            assert torch.equal(tensor, before[name])
    weight_file.read_payload(second)
    with pytest.raises(WeightDigestMismatch):
        weight_file.read_payload(first)


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """A partially written version is refused."""
    seen: list[type[BaseException]] = []

    class Nosy(Weights):
        update: WeightUpdate

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.tensors.items()
            if self.passes:
                try:
                    weight_file.read_payload(self.update)
                except BlockingIOError as error:
                    seen.append(type(error))
            self.passes += 1

    source = Nosy(a=torch.ones(3))
    publisher = WeightPublisher(source, tmp_path, "run")
    source.update = published(publisher, 1)
    published(publisher, 2)
    assert seen == [BlockingIOError]


def test_a_rank_that_only_iterates(tmp_path: Path) -> None:
    """It participates in the collective once per version and leaves no file."""
    source = some_weights()
    publisher = WeightPublisher(source, tmp_path, "run", writes=False)
    assert publisher.publish(1) is None
    assert publisher.publish(2) is None
    assert source.passes == 2
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_sources_and_names(tmp_path: Path) -> None:
    """Used-up iterators, duplicates and run ids that are paths."""
    used_up = iter([("a", torch.ones(1))])
    publisher = WeightPublisher(used_up, tmp_path, "run")
    published(publisher, 1)
    with pytest.raises(ValueError, match="empty"):
        publisher.publish(2)
    with pytest.raises(ValueError, match="twice"):
        WeightPublisher([("a", torch.ones(1)), ("a", torch.ones(1))], tmp_path, "run").publish(1)
    for run_id in ("../x", "a/b", "", "a b"):
        with pytest.raises(ValueError, match="run id"):
            WeightPublisher([], tmp_path, run_id)


def test_links_and_open_files_are_refused(publisher: WeightPublisher, tmp_path: Path) -> None:
    """By the reader and by both writers; the target of a link is never touched."""
    update = published(publisher, 1)
    payload = np.array(weight_file.read_payload(update))
    canary = tmp_path / "canary"
    canary.write_bytes(b"untouched")
    os.unlink(update.path)
    os.symlink(canary, update.path)
    with pytest.raises(WeightFileRefused, match="link"):
        weight_file.read_payload(update)
    with pytest.raises(WeightFileRefused, match="link"):
        weight_file.write_payload(update, payload)
    with pytest.raises(WeightFileRefused, match="link"):
        publisher.publish(2)
    assert canary.read_bytes() == b"untouched"
    os.unlink(update.path)
    Path(update.path).write_bytes(payload.tobytes())
    os.chmod(update.path, 0o644)
    with pytest.raises(WeightFileRefused, match="private"):
        weight_file.read_payload(update)
    with pytest.raises(WeightFileRefused, match="not the name"):
        weight_file.write_payload(dataclasses.replace(update, path=str(canary)), payload)
    with pytest.raises(ValueError, match="received 511 bytes of weights, expected 512"):
        weight_file.write_payload(update, payload[:-1])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("a", "float32", (4,), 0, 999),
        TensorSpec("a", "float32", (4,), 64, 16),
        TensorSpec("a", "float32", (4,), -64, 16),
        TensorSpec("a", "float32", (4,), 4, 16),
        TensorSpec("a", "Tensor", (4,), 0, 16),
    ],
    ids=["size", "end", "negative", "alignment", "dtype"],
)
def test_invalid_descriptions_are_refused(tmp_path: Path, spec: TensorSpec) -> None:
    """An update whose layout does not fit its payload yields nothing."""
    update = published(WeightPublisher([("a", torch.ones(4))], tmp_path, "run"), 1)
    changed = dataclasses.replace(update, tensors=(spec,))
    with weight_file.open_weights(changed) as weights, pytest.raises(WeightFileRefused, match="invalid description"):
        list(weights.tensors())


def test_files_of_dead_publishers_are_removed(tmp_path: Path) -> None:
    """Of the same run only, and never a living publisher's."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"troupe-run-{dead.pid}-0.weights"
    foreign = tmp_path / f"troupe-other-{dead.pid}-0.weights"
    living = tmp_path / f"troupe-run-{os.getppid()}-0.weights"
    for path in (left, foreign, living):
        path.touch(mode=0o600)
    WeightPublisher([], tmp_path, "run", writes=False)
    assert left.exists()
    WeightPublisher([], tmp_path, "run")
    assert not left.exists()
    assert foreign.exists() and living.exists()


@pytest.mark.parametrize("piece, stretch", [(96, 96), (128, 1000), (1000, 4000)])
def test_parallel_writing_gives_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, stretch: int
) -> None:
    """A tensor that is only there until the next one is written before; others are written side by side."""
    monkeypatch.setattr(weight_file, "_PIECE", piece)
    monkeypatch.setattr(weight_file, "_STRETCH", stretch)
    tensors = {f"t{n}": torch.randn(1 + 37 * n) for n in range(20)}

    def fleeting() -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(1000)
        for name, tensor in tensors.items():
            room[: len(tensor)] = tensor
            yield name, room[: len(tensor)]
            room.zero_()

    side_by_side = published(WeightPublisher(list(tensors.items()), tmp_path, "a", lasting=True), 1)
    one_by_one = published(WeightPublisher(fleeting, tmp_path, "b"), 1)
    assert side_by_side.digest == one_by_one.digest
    for update in (side_by_side, one_by_one):
        read = dict(weight_file.read_weights(update))
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_file_stays_mapped_until_it_is_replaced(tmp_path: Path) -> None:
    source = Weights(a=torch.ones(1000))
    publisher, mapping = WeightPublisher(source, tmp_path, "run"), FileMapping(mmap.PROT_READ)

    def opened(update: WeightUpdate) -> tuple[int, float]:
        """(address of the payload, first number)"""
        with weight_file.open_weights(update, mapping) as weights:
            weights.verify()
            return weights.payload.ctypes.data, float(dict(weights.tensors())["a"][0])

    first, one = opened(published(publisher, 1))
    source.tensors = {"a": torch.full((1000,), 2.0)}
    update = published(publisher, 2)  # a mapping does not keep the publisher out
    second, two = opened(update)
    assert (first, one, two) == (second, 1.0, 2.0)
    assert Path(update.path).name in Path("/proc/self/maps").read_text()
    source.tensors = {"a": torch.full((3000,), 3.0)}
    assert opened(published(publisher, 3))[1] == 3.0
    other = WeightPublisher(Weights(a=torch.full((1000,), 4.0)), tmp_path, "other")
    assert opened(published(other, 1))[1] == 4.0
    publisher.close()
    assert Path(update.path).name not in Path("/proc/self/maps").read_text()


def test_a_file_does_not_outlive_its_publisher(tmp_path: Path) -> None:
    """However that ends."""
    code = f"""
import time, torch
from pathlib import Path
from troupe.workers.weights.file import WeightPublisher
publisher = WeightPublisher([("w", torch.ones(4))], Path({str(tmp_path)!r}), "run")
print(publisher.publish(1).path, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.is_file() and path.parent == tmp_path
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.exists()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """/dev/full stands for a full shared memory."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with ThreadPoolExecutor(1) as core:
            writer = weight_file._PayloadWriter(fd, tmp_path / "x.weights", np.empty(0, np.uint8), core)
            writer.append(np.ones(8, np.uint8))
            with pytest.raises(OSError, match=r"x\.weights"):
                writer.flush()
    finally:
        os.close(fd)


def test_the_error_can_be_pickled() -> None:
    """Ray pickles exceptions."""
    error = pickle.loads(pickle.dumps(WeightDigestMismatch("rollout-0", "aa", "bb")))
    assert (error.name, error.expected, error.got) == ("rollout-0", "aa", "bb")
    assert "rollout-0" in str(error)


def test_a_file_that_was_removed_is_damaged(publisher: WeightPublisher) -> None:
    """It is published again, as weights that have changed are."""
    update = published(publisher, 1)
    Path(update.path).unlink()
    with pytest.raises(WeightDigestMismatch, match="none: the file is not there"):
        weight_file.read_payload(update)
    with pytest.raises(WeightDigestMismatch):
        weight_file.read_payload(update)
    again = published(publisher, 1)
    assert (again.path, again.digest) == (update.path, update.digest)
    weight_file.read_payload(again)

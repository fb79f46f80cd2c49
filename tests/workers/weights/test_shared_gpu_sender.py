"""Weights through a buffer on a shared GPU: the sender's side and the plain form of the handles, without a GPU."""

from __future__ import annotations

import gc
import inspect
import itertools
import pickle
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]: it is documented
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor, reduce_tensor

from troupe.workers.contract.messages import WeightAck
from troupe.workers.weights import device_sender as sending
from troupe.workers.weights import gpu_handles
from troupe.workers.weights.buckets import Bucket, buckets_of, checksums, unpack, weights_digest
from troupe.workers.weights.transfer_group import TransferFailed

HANDLE = (7, b"h" * 66, 4096, 512, False, b"r" * 64, 3, b"e" * 64, True)
"""What `reduce_tensor` returns behind the types, for memory of GPU 7."""


def test_a_handle_survives_msgpack_and_is_opened_on_the_receivers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's msgpack refuses the types of the arguments of `reduce_tensor`."""
    serial = pytest.importorskip("vllm.v1.serial_utils")
    buffer = torch.zeros(64, dtype=torch.uint8)[16:]
    types = (torch.Tensor, buffer.size(), buffer.stride(), 16, torch.storage.TypedStorage, torch.uint8)
    monkeypatch.setattr(gpu_handles, "reduce_tensor", lambda tensor: (None, (*types, *HANDLE)))
    opened: list[Any] = []
    monkeypatch.setattr(gpu_handles, "rebuild_cuda_tensor", lambda *arguments: opened.append(arguments))
    update = {"version": 3, "bucket": 0, "handles": {"GPU-x": gpu_handles.export_handle(buffer)}}
    arrived = serial.MsgpackDecoder().decode(serial.MsgpackEncoder().encode(update))
    gpu_handles.open_handle(arrived["handles"]["GPU-x"], torch.device("cuda", 2))
    assert opened == [(*types[:1], torch.Size([48]), (1,), *types[3:], 2, *HANDLE[1:])]


def test_a_handle_is_released_by_the_counter_that_torch_reads_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *counter: released.append(counter))
    gpu_handles.release_handle([16, 48, *HANDLE])
    assert released == [(b"r" * 64, 3)]
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names.index("ref_counter_handle") - gpu_handles._DEVICE + 2 == gpu_handles._COUNTER.start
    assert names.index("ref_counter_offset") - gpu_handles._DEVICE + 3 == gpu_handles._COUNTER.stop


def test_the_types_of_a_handle_are_those_that_torch_names() -> None:
    """On the CPU torch names the same class of tensor and storage."""
    buffer = torch.zeros(8, dtype=torch.uint8)
    assert type(buffer._typed_storage()) is torch.storage.TypedStorage
    _, arguments = reduce_tensor(buffer)
    assert arguments[0] is torch.Tensor


class OneGpu:
    """An engine on the sender's GPU: the link, and what `open_handle` shows it."""

    processes = 1

    def __init__(self, buckets: tuple[Bucket, ...], fails_at: int = -1, engines: int = 1) -> None:
        """`engines`: processes on the GPU that open each handle."""
        self.packed = [threading.Event() for _ in buckets]
        """Set when a bucket is in its buffer."""
        self.buckets = buckets
        self.fails_at = fails_at
        self.engines = engines
        self.calls: list[str] = []
        self.received: list[tuple[str, torch.Tensor]] = []
        self.sums: list[torch.Tensor] = []
        self.memory: dict[int, torch.Tensor] = {}
        self.exported: list[StorageWeakRef] = []
        """Buffers that were shown to it."""
        self.counts: dict[int, int] = {}
        """torch's counter of each handle: what is above 0 is never freed."""

    def join(self, info: dict[str, Any]) -> None:
        """Be told the layout."""
        self.calls.append("join")
        assert [name for name, _, _ in info["tensors"]] == [s.name for b in self.buckets for s in b.tensors]

    def start(self) -> None:
        """Begin."""
        self.calls.append("start")

    def receive(self, info: dict[str, Any]) -> None:
        """Copy a bucket, as slowly as the sender permits: when the next one is in its buffer."""
        assert all(event.wait(10) for event in self.packed[: info["bucket"] + 2]), "the next one waits for this one"
        assert not any(event.is_set() for event in self.packed[info["bucket"] + 2 :]), "a third bucket"
        if info["bucket"] == self.fails_at:
            raise ConnectionError("rollout-0 is gone")
        assert not self.exported[info["bucket"]].expired()
        self.calls.append(f"bucket {info['bucket']}")
        bucket = self.buckets[info["bucket"]]
        address, number = info["handles"]["GPU-x"]
        packed = self.memory[address].clone()
        self.counts[number] -= self.engines
        self.sums.append(checksums(bucket, packed))
        self.received += unpack(bucket, packed)

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        """Serve. The engine takes its memory back here: the sender's buffer must be free."""
        self.calls.append("finish")
        assert max(self.counts.values()) <= 0
        self.memory.clear()
        assert all(buffer.expired() for buffer in self.exported)
        assert digest == weights_digest(self.buckets, self.sums)
        return [WeightAck("rollout-0", version, digest, 0.0)]

    def export(self, packed: torch.Tensor) -> list[Any]:
        """The handle of a buffer that is used for every second bucket."""
        self.memory[packed.data_ptr()] = packed
        self.exported.append(StorageWeakRef(packed.untyped_storage()))
        self.packed[len(self.exported) - 1].set()
        self.counts[len(self.counts)] = 1
        return [packed.data_ptr(), len(self.counts) - 1]

    def release(self, handle: list[Any]) -> None:
        """Count down."""
        self.counts[handle[1]] -= 1


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Types mixed, an odd number of elements before a wider type, and one tensor above the limit."""
    torch.manual_seed(3)
    yield "a", torch.randn(3, 5).bfloat16()
    yield "b", torch.randn(7)
    yield "c", torch.randn(300, 4)
    yield "d", torch.randn(2)


def connected(
    monkeypatch: pytest.MonkeyPatch, fails_at: int = -1, engines: int = 1
) -> tuple[OneGpu, sending.DeviceSender]:
    """A sender and its engine."""
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]
    engine = OneGpu(buckets_of(shapes, 1024), fails_at, engines)
    monkeypatch.setattr(sending, "gpu_id", lambda device: "GPU-x")
    monkeypatch.setattr(sending, "export_handle", engine.export)
    monkeypatch.setattr(sending, "release_handle", engine.release)
    return engine, sending.device_sender("ipc", engine, shapes, 0, torch.device("cpu"), 1024)


@pytest.mark.parametrize("engines", [0, 1, 2])
def test_an_engine_copies_a_bucket_while_the_next_one_is_packed(monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
    """None on this rank's GPU, one, or two that open the same handle: the memory is freed before they serve."""
    engine, sender = connected(monkeypatch, engines=engines)
    sent = sender.send(4, weights())
    assert sent is not None and sent.acks[0].digest == sent.digest
    assert engine.calls == ["join", "start", "bucket 0", "bucket 1", "bucket 2", "finish"]
    assert len({buffer.cdata for buffer in engine.exported}) == 2
    for (name, got), (expected_name, expected) in zip(engine.received, weights(), strict=True):
        assert name == expected_name and torch.equal(got, expected)


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_an_engine_that_fails_ends_the_transfer(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next bucket packed behind it, or as the last one."""
    engine, sender = connected(monkeypatch, fails_at=bucket)
    gc.disable()  # it would free the buffers some time later
    try:
        with pytest.raises(TransferFailed, match="rollout-0 is gone"):
            sender.send(4, weights())
        engine.memory.clear()
        assert all(buffer.expired() for buffer in engine.exported)
    finally:
        gc.enable()
    assert engine.calls[2:] == [f"bucket {number}" for number in range(bucket)]
    assert max(engine.counts.values()) <= 0, "the handle that nobody has opened would keep the buffer for good"


def test_weights_that_fail_behind_a_bucket_wait_until_the_engine_has_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sender = connected(monkeypatch)
    copied = threading.Event()

    def receive(info: dict[str, Any]) -> None:
        assert not copied.wait(0.2), "the sender gave its buffers up"
        engine.calls.append("copied")

    def cut() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(weights(), 2)
        raise OSError("a layer is gone")

    monkeypatch.setattr(engine, "receive", receive)
    monkeypatch.setattr(sending, "release_handle", lambda handle: copied.set())
    with pytest.raises(TransferFailed, match="a layer is gone"):
        sender.send(4, cut())
    assert engine.calls[-1] == "copied" and copied.is_set()


class Rank(threading.local):
    """What the sender uses of torch.distributed, for ranks that are threads.

    Ranks in different collectives fail here. Those of the trainers' group would wait for each other.
    """

    def __init__(self) -> None:
        self.rank, self.called = 0, 0

    def join(self, store: HashStore, rank: int) -> None:
        """Be this rank."""
        self.store, self.rank, self.called = store, rank, 0

    def is_initialized(self) -> bool:
        """There is a group."""
        return True

    def get_world_size(self) -> int:
        """Two ranks."""
        return 2

    def all_gather_object(self, found: list[Any], own: Any, kind: str = "objects") -> None:
        """Every rank's object."""
        store: Any = self.store  # takes bytes, too
        store.set(f"{self.called}/{self.rank}", pickle.dumps((kind, own)))
        both = [pickle.loads(self.store.get(f"{self.called}/{rank}")) for rank in range(2)]
        self.called += 1
        assert both[0][0] == both[1][0], f"rank 0 is in {both[0][0]}, rank 1 in {both[1][0]}"
        found[:] = [value for _, value in both]


def gathered(ranks: Rank, open_weights: list[str], fails_at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as ZeRO-3 has them: all ranks gather each one, and each divides it again when it goes on."""
    for name, tensor in weights():
        ranks.all_gather_object([], None, f"the gather of {name}")
        open_weights.append(name)
        try:
            yield name, tensor[:1] if name == fails_at else tensor
        finally:
            open_weights.remove(name)


@pytest.mark.parametrize("fault", ["engine", "rank 0", "rank 1"])
def test_after_a_failure_every_rank_has_divided_all_weights_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that one rank still has whole is not gathered by it the next time: the other would wait for it."""
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]
    engine, ranks, store = OneGpu(buckets_of(shapes, 1024), 1 if fault == "engine" else -1), Rank(), HashStore()
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(sending, "gpu_id", lambda device: "GPU-y" if ranks.rank else "GPU-x")
    monkeypatch.setattr(sending, "export_handle", lambda packed: engine.export(packed) if not ranks.rank else [])
    monkeypatch.setattr(sending, "release_handle", lambda handle: engine.release(handle) if handle else None)
    monkeypatch.setattr(sending, "dist", ranks)
    ended: list[tuple[str, list[str], int]] = [("", [], 0)] * 2

    def send(rank: int) -> None:
        ranks.join(store, rank)
        sender = sending.device_sender("ipc", engine, shapes, rank, torch.device("cpu"), 1024)
        whole: list[str] = []
        try:
            sender.send(4, gathered(ranks, whole, "b" if fault == f"rank {rank}" else ""))
        except BaseException as error:
            ended[rank] = f"{type(error).__name__}: {error}", list(whole), ranks.called

    gc.disable()  # it would divide them some time later
    try:
        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.enable()
    reason = "rollout-0 is gone" if fault == "engine" else "the weights do not match their layout: b is to be sent"
    assert all(error.startswith(f"TransferFailed: {reason}") for error, _, _ in ended), ended
    assert [whole for _, whole, _ in ended] == [[], []]
    assert ended[0][2] == ended[1][2]


@pytest.mark.parametrize("swapped", [False, True])
def test_each_process_of_an_engine_over_two_gpus_copies_from_the_rank_on_its_own(
    swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks and the two receivers of one engine, vLLM's own class; `swapped`: its first is on the second GPU."""
    receiving = pytest.importorskip("troupe.workers.weights.vllm_transfer")
    given = list(weights())  # drawn here: the threads share a generator
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in given]
    ranks, store, memory = Rank(), HashStore(), dict[str, list[torch.Tensor]]()
    store.set_timeout(timedelta(seconds=20))
    engine = OneGpu(buckets_of(shapes, 1024))
    gpus = ["GPU-1", "GPU-0"] if swapped else ["GPU-0", "GPU-1"]

    def export(packed: torch.Tensor) -> list[Any]:
        shown = memory.setdefault(f"GPU-{ranks.rank}", [])
        shown.append(packed)
        return [ranks.rank, len(shown) - 1]

    def receiver(gpu: str) -> Any:
        class Process(receiving.SharedGpuWeightTransferEngine):
            def __init__(self) -> None:
                self._buckets, self._sums, self.device = buckets_of(shapes, 1024), [], gpu
                self._reload = SimpleNamespace(load=lambda tensors: self.loads.update(tensors))
                self.loads: dict[str, torch.Tensor] = {}

        return Process()

    processes = [receiver(gpu) for gpu in gpus]

    def receive(info: dict[str, Any]) -> None:
        assert info["handles"] == {f"GPU-{rank}": [rank, info["bucket"]] for rank in range(2)}
        for process in processes:
            process._receive(receiving.SharedGpuUpdateInfo(**info))

    def opened(handle: list[int], device: str) -> torch.Tensor:
        assert device == f"GPU-{handle[0]}", "the memory of another GPU"
        return memory[device][handle[1]]

    def acknowledge(version: int, digest: str) -> list[WeightAck]:
        assert all(weights_digest(process._buckets, process._sums) == digest for process in processes)
        return [WeightAck("rollout-0", version, digest, 0.0)]

    monkeypatch.setattr(engine, "receive", receive)
    monkeypatch.setattr(engine, "finish", acknowledge)
    monkeypatch.setattr(receiving, "gpu_id", lambda device: device)
    monkeypatch.setattr(receiving, "open_handle", opened)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(sending, "gpu_id", lambda device: f"GPU-{ranks.rank}")
    monkeypatch.setattr(sending, "export_handle", export)
    monkeypatch.setattr(sending, "release_handle", lambda handle: None)
    monkeypatch.setattr(sending, "dist", ranks)
    sent: list[Any] = [None, None]

    def send(rank: int) -> None:
        ranks.join(store, rank)
        sender = sending.device_sender("ipc", engine, shapes, rank, torch.device("cpu"), 1024)
        sent[rank] = sender.send(4, iter(given))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent[0] is not None and sent[0].acks[0].version == 4 and sent[1] is None
    for process in processes:
        for name, expected in given:
            assert torch.equal(process.loads[name], expected)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_another_process_cannot_open_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} sets expandable_segments: another process cannot open"):
        gpu_handles.check_allocator({name: "max_split_size_mb:128, expandable_segments:True"})
    gpu_handles.check_allocator({name: "expandable_segments:False,max_split_size_mb:128"})
    gpu_handles.check_allocator({})

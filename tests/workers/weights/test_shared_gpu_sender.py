"""Weights through a buffer on a shared GPU: the sender's side and the plain form of the handles, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

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


def test_the_types_of_a_handle_are_those_that_torch_names() -> None:
    """On the CPU torch names the same class of tensor and storage."""
    buffer = torch.zeros(8, dtype=torch.uint8)
    assert type(buffer._typed_storage()) is torch.storage.TypedStorage
    _, arguments = reduce_tensor(buffer)
    assert arguments[0] is torch.Tensor


class OneGpu:
    """An engine on the sender's GPU: the link, and what `open_handle` shows it."""

    processes = 1

    def __init__(self, buckets: tuple[Bucket, ...], fails_at: int = -1) -> None:
        self.buckets = buckets
        self.fails_at = fails_at
        self.calls: list[str] = []
        self.received: list[tuple[str, torch.Tensor]] = []
        self.sums: list[torch.Tensor] = []
        self.memory: dict[int, torch.Tensor] = {}

    def join(self, info: dict[str, Any]) -> None:
        """Be told the layout."""
        self.calls.append("join")
        assert [name for name, _, _ in info["tensors"]] == [s.name for b in self.buckets for s in b.tensors]

    def start(self) -> None:
        """Begin."""
        self.calls.append("start")

    def receive(self, info: dict[str, Any]) -> None:
        """Copy a bucket."""
        if info["bucket"] == self.fails_at:
            raise ConnectionError("rollout-0 is gone")
        self.calls.append(f"bucket {info['bucket']}")
        bucket = self.buckets[info["bucket"]]
        packed = self.memory[info["handles"]["GPU-x"][0]].clone()
        self.sums.append(checksums(bucket, packed))
        self.received += unpack(bucket, packed)

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        """Serve."""
        self.calls.append("finish")
        assert digest == weights_digest(self.buckets, self.sums)
        return [WeightAck("rollout-0", version, digest, 0.0)]

    def export(self, packed: torch.Tensor) -> list[Any]:
        """The handle of a buffer that is used for every bucket."""
        self.memory = {packed.data_ptr(): packed}
        return [packed.data_ptr()]


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Types mixed, an odd number of elements before a wider type, and one tensor above the limit."""
    torch.manual_seed(3)
    yield "a", torch.randn(3, 5).bfloat16()
    yield "b", torch.randn(7)
    yield "c", torch.randn(300, 4)
    yield "d", torch.randn(2)


def connected(monkeypatch: pytest.MonkeyPatch, fails_at: int = -1) -> tuple[OneGpu, sending.DeviceSender]:
    """A sender and its engine."""
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]
    engine = OneGpu(buckets_of(shapes, 1024), fails_at)
    monkeypatch.setattr(sending, "gpu_id", lambda device: "GPU-x")
    monkeypatch.setattr(sending, "export_handle", engine.export)
    return engine, sending.device_sender("ipc", engine, shapes, 0, torch.device("cpu"), 1024)


def test_an_engine_copies_every_bucket_from_the_shared_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sender = connected(monkeypatch)
    sent = sender.send(4, weights())
    assert sent is not None and sent.acks[0].digest == sent.digest
    assert engine.calls == ["join", "start", "bucket 0", "bucket 1", "bucket 2", "finish"]
    for (name, got), (expected_name, expected) in zip(engine.received, weights(), strict=True):
        assert name == expected_name and torch.equal(got, expected)


def test_an_engine_that_fails_ends_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sender = connected(monkeypatch, fails_at=1)
    with pytest.raises(TransferFailed, match="rollout-0 is gone"):
        sender.send(4, weights())
    assert engine.calls[-1] == "bucket 0"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_another_process_cannot_open_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} sets expandable_segments: another process cannot open"):
        gpu_handles.check_allocator({name: "max_split_size_mb:128, expandable_segments:True"})
    gpu_handles.check_allocator({name: "expandable_segments:False,max_split_size_mb:128"})
    gpu_handles.check_allocator({})

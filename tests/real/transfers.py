"""Transfers of a trainer's weights to an engine's process that is played by a thread of rank 0, with faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from troupe.workers.contract.messages import WeightAck
from troupe.workers.contract.weight_backends import TransferBackend
from troupe.workers.training.deepspeed_engine import TrainEngine
from troupe.workers.weights import device_sender as sending
from troupe.workers.weights.buckets import Bucket, buckets_of, checksums, weights_digest
from troupe.workers.weights.file import DTYPES
from troupe.workers.weights.transfer_group import TransferGroup, connect_store

BUCKET = 256 * 1024
"""Several buckets of the model of `test_trainer.py`."""
FAULTS = ("none", "engine", "rank", "none again")
CPU = torch.device("cpu")


class Receiver:
    """The engine's process: receives over gloo, or copies from the buffers that rank 0 shows it."""

    processes = 1

    def __init__(self) -> None:
        self.fails_at = -1
        self.shown: list[torch.Tensor] = []
        self.buckets: tuple[Bucket, ...] = ()
        self.sums: list[torch.Tensor] = []
        self.group: TransferGroup | None = None

    def join(self, info: dict[str, Any]) -> None:
        """Join the sender."""
        shapes = [(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in info["tensors"]]
        self.buckets = buckets_of(shapes, info["bucket_bytes"])
        self.group = None
        if "port" in info:
            self.group = TransferGroup(connect_store(info["address"], info["port"]), 1, 2, CPU)

    def start(self) -> None:
        """Begin."""
        self.sums = []

    def receive(self, info: dict[str, Any]) -> None:
        """Receive all buckets, or one."""
        if self.group is None:
            self._take(info["bucket"], self.shown[info["handles"]["GPU-0"][0]])
            return
        try:
            for number, bucket in enumerate(self.buckets):
                packed = torch.empty(bucket.nbytes, dtype=torch.uint8)
                self.group.broadcast(packed)()
                self._take(number, packed)
        except BaseException:
            self.group.leave()
            raise

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        """Answer with the digest of what arrived."""
        return [WeightAck("rollout-0", version, weights_digest(self.buckets, self.sums), 0.0)]

    def show(self, packed: torch.Tensor) -> list[Any]:
        """In place of a handle of a buffer on a GPU."""
        self.shown.append(packed)
        return [len(self.shown) - 1]

    def _take(self, number: int, packed: torch.Tensor) -> None:
        if number == self.fails_at:
            raise ConnectionError("rollout-0 is gone")
        self.sums.append(checksums(self.buckets[number], packed))


def send(engine: TrainEngine, backend: TransferBackend) -> dict[str, list[tuple[str, list[str]]]]:
    """One transfer after another, two of them with a fault in the middle. Collective.

    Returns:
        For each of `FAULTS` and each rank: the digest that the engine acknowledged, or the error, and the parameters
        that the rank has whole afterwards and had divided before.
    """
    receiver, found = Receiver(), {}
    sending.gpu_id = lambda device: f"GPU-{engine.rank}"
    sending.export_handle = receiver.show
    sending.release_handle = lambda handle: None
    before = _whole(engine)
    for fault in FAULTS:
        receiver.fails_at = 2 if fault == "engine" else -1
        weights = engine.named_weights()
        # Over gloo only the first rank sends; with ipc every rank does.
        if fault == "rank" and engine.rank == (1 if backend == "ipc" else 0):
            weights = _cut(weights)
        sender = sending.device_sender(backend, receiver, engine.weight_shapes(), engine.rank, CPU, BUCKET)
        try:
            sent = sender.send(1, weights)
            result = "" if sent is None else sent.acks[0].digest
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        sender.close()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (result, sorted(_whole(engine) - before)))
        found[fault] = ranks
    return found


def _cut(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tenth tensor has lost a row."""
    for number, (name, tensor) in enumerate(weights):
        yield name, tensor[1:] if number == 10 else tensor


def _whole(engine: TrainEngine) -> set[str]:
    """Names of the parameters that DeepSpeed has gathered on this rank."""
    return {name for name, parameter in engine._model.named_parameters() if parameter.numel()}

"""The trainer's side of weight transfers from device to device: packs buckets and drives the engines' side.

Over a process group (nccl, gloo), rank 0 of the trainers broadcasts every bucket to all engine processes while they
receive. Between processes on one GPU (ipc), every rank packs the bucket into a buffer on its own GPU, and the engine
processes copy it from there. In both cases every trainer rank iterates over all weights, because ZeRO-3 gathers them
together: after a failure as well, so that no rank waits for another in a gather, and all leave the same parameters.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from troupe.workers.contract.imports import resolve
from troupe.workers.contract.messages import WeightsSent
from troupe.workers.contract.roles import EngineLink
from troupe.workers.contract.weight_backends import BACKENDS, TransferBackend
from troupe.workers.training.group import open_store, own_address
from troupe.workers.weights.buckets import BUCKET_BYTES, Bucket, Shape, buckets_of, checksums, pack, weights_digest
from troupe.workers.weights.gpu_handles import PlainHandle, export_handle, gpu_id, release_handle
from troupe.workers.weights.transfer_group import BOUND_S, TransferFailed, TransferGroup

T = TypeVar("T")
NamedTensors = Iterator[tuple[str, torch.Tensor]]


def device_sender(
    backend: TransferBackend,
    link: EngineLink,
    shapes: Sequence[Shape],
    rank: int,
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
) -> DeviceSender:
    """The sender of a back-end, connected to the engines by rank 0. Collective. `shapes`: names, types and whole
    shapes, in order. Raises TransferFailed if an engine did not join, ValueError for what it cannot send."""
    row = BACKENDS[backend]
    if row.sender is None:
        raise ValueError(f"{backend} writes a file and has no sender")
    buckets = buckets_of(shapes, bucket_bytes)
    described = {
        "bucket_bytes": bucket_bytes,
        "tensors": [[spec.name, spec.dtype, list(spec.shape)] for bucket in buckets for spec in bucket.tensors],
    }
    return resolve(row.sender)(link, buckets, described, rank, device)


class DeviceSender:
    """Sends versions of the weights to the engines of one link."""

    def __init__(
        self, link: EngineLink, buckets: Sequence[Bucket], described: dict[str, Any], rank: int, device: torch.device
    ) -> None:
        """Connect to the engines, which only rank 0 calls. Collective."""
        self._link = link
        self._buckets = buckets
        self._rank = rank
        self._device = device
        if rank == 0:
            self._join(described)

    @abstractmethod
    def send(self, version: int, tensors: NamedTensors) -> WeightsSent | None:
        """Send these weights as `version`. Collective; only rank 0 returns what was sent. Raises TransferFailed if an
        engine failed or did not answer; the sender is of no more use."""

    def close(self) -> None:
        """Leave the engines."""

    @abstractmethod
    def _join(self, described: dict[str, Any]) -> None:
        """Make the engines join; called on rank 0."""

    def _two_buffers(self) -> list[torch.Tensor]:
        """Memory for two of the buckets at a time, uint8."""
        size = max((bucket.nbytes for bucket in self._buckets), default=0)
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self._buckets[:2]]

    def _finish(self, version: int, sums: Sequence[torch.Tensor]) -> WeightsSent:
        digest = weights_digest(self._buckets, sums)
        acks = self._link.finish(version, digest)
        return WeightsSent(version, digest, sum(bucket.nbytes for bucket in self._buckets), tuple(acks))


class GroupSender(DeviceSender):
    """Broadcasts from rank 0 of the trainers to every engine process."""

    _group: TransferGroup | None = None
    """On rank 0, until a transfer fails."""

    def _join(self, described: dict[str, Any]) -> None:
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="engines")
        address = own_address()
        store = open_store(address, timedelta(seconds=BOUND_S))
        size = 1 + self._link.processes
        place = {"address": address, "port": store.port, "first_rank": 1, "world_size": size}
        joined = self._calls.submit(self._link.join, described | place)
        self._group = TransferGroup(store, 0, size, self._device, check=lambda: _raise_failure(joined))
        joined.result()

    def send(self, version: int, tensors: NamedTensors) -> WeightsSent | None:
        if self._group is None:
            for _ in tensors:
                pass
            return None
        try:
            self._link.start()
            received = self._calls.submit(self._link.receive, {"version": version})
            sums = self._broadcast(self._group, tensors, received)
            received.result()
            return self._finish(version, sums)
        except BaseException:
            self.close()
            for _ in tensors:
                pass
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None
            self._calls.shutdown(wait=False, cancel_futures=True)

    def _broadcast(self, group: TransferGroup, tensors: NamedTensors, received: Future[None]) -> list[torch.Tensor]:
        """Send all buckets, the next one packed while one is under way; returns the checksums of the packed bytes."""
        group.check = lambda: _raise_failure(received)
        sums: list[torch.Tensor] = []
        buffers = self._two_buffers()
        wait: Callable[[], None] | None = None
        for number, bucket in enumerate(self._buckets):
            packed = pack(bucket, tensors, buffers[number % 2])
            sums.append(checksums(bucket, packed))
            if wait is not None:
                wait()
            wait = group.broadcast(packed)
        _expect_end(tensors)
        if wait is not None:
            wait()
        return sums


class SharedGpuSender(DeviceSender):
    """Makes the engine processes copy every bucket from a buffer on the GPU that they share with a trainer rank.

    Two buckets are in flight: the engines copy and load one while every rank packs the next into the other buffer.
    """

    def __init__(
        self, link: EngineLink, buckets: Sequence[Bucket], described: dict[str, Any], rank: int, device: torch.device
    ) -> None:
        super().__init__(link, buckets, described, rank, device)
        self._buffers: list[torch.Tensor] = []
        self._handles: list[PlainHandle] = []
        self._loading: Future[None] | None = None
        """On rank 0, the engines' copy of the bucket before the one that is packed."""

    def _join(self, described: dict[str, Any]) -> None:
        self._link.join(described)

    def send(self, version: int, tensors: NamedTensors) -> WeightsSent | None:
        sums: list[torch.Tensor] = []
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="engines") as calls:
                self._on_every_rank(self._begin)
                for number in range(len(self._buckets)):
                    packed = self._on_every_rank(lambda: self._pack(number, tensors, sums))  # noqa: B023
                    handles = {gpu: handle for part in packed for gpu, handle in part.items()}
                    if self._rank == 0:
                        update = {"version": version, "bucket": number, "handles": handles}
                        self._loading = calls.submit(self._link.receive, update)
                self._on_every_rank(self._await_engines)
            _expect_end(tensors)
            # The engines take back the memory of their KV caches when they serve.
            self._on_every_rank(self._free)
        except BaseException:
            # The driver is not asked to free it: another engine may be copying. torch uses the memory again.
            self._drop_buffers()
            for _ in tensors:
                pass
            raise
        return self._finish(version, sums) if self._rank == 0 else None

    def _begin(self) -> None:
        """Allocate the buffers. Rank 0 makes the engines begin."""
        self._buffers = self._two_buffers()
        if self._rank == 0:
            self._link.start()

    def _pack(self, number: int, tensors: NamedTensors, sums: list[torch.Tensor]) -> dict[str, Any]:
        """Fill this rank's buffer of the bucket, which the engines have left, and wait until they have left the
        other; returns its handle, by the GPU's id."""
        bucket = self._buckets[number]
        own = itertools.islice(tensors, len(bucket.tensors))
        try:
            packed = pack(bucket, own, self._buffers[number % 2])
            sums.append(checksums(bucket, packed))
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self._handles.append(export_handle(packed))
            return {gpu_id(self._device): self._handles[-1]}
        except Exception:
            for _ in own:  # as far as the other ranks, which gather the same tensors
                pass
            raise
        finally:
            self._await_engines()

    def _await_engines(self) -> None:
        """Wait until the engines have loaded the last bucket. Raises what they raise."""
        loading, self._loading = self._loading, None
        try:
            if loading is not None:
                loading.result()
        finally:
            del loading  # its error refers to this call, and both would keep the buffers

    def _drop_buffers(self) -> None:
        """Leave the buffers' memory to torch."""
        for handle in self._handles:
            release_handle(handle)
        self._handles.clear()
        self._buffers.clear()

    def _free(self) -> None:
        """Give back the buffers' memory, and other unused allocations of this process."""
        self._drop_buffers()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _on_every_rank(self, step: Callable[[], T]) -> list[T]:
        """Run a step on every rank; returns the result of each. A failure is raised on all of them. Collective."""
        result: T | None = None
        failure = ""
        cause: Exception | None = None
        try:
            result = step()
        except Exception as error:
            cause, failure = error, str(error) or type(error).__name__
        outcomes: list[Any] = [(result, failure)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            outcomes = [None] * dist.get_world_size()
            dist.all_gather_object(outcomes, (result, failure))
        try:
            for _, failure in outcomes:
                if failure:
                    raise TransferFailed(failure) from cause
        finally:
            del cause  # its traceback refers to this call, and both would keep the weights in memory
        return [result for result, _ in outcomes]


def _raise_failure(call: Future[None]) -> None:
    """Raise the error of the engines' side, if any."""
    if call.done():
        call.result()


def _expect_end(tensors: NamedTensors) -> None:
    extra = next(tensors, None)
    if extra is not None:
        raise ValueError(f"the weights do not match their layout: {extra[0]} is not to be sent")

"""The table of weight-transfer back-ends: one row each, plain data.

The spec, its checks, the memory plan, the weight sync, the policy and the engines read the rows. Code is named by its
path (`module:name`), so that the table imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransferBackend = Literal["shm", "ipc", "nccl", "gloo", "store"]
_Device = Literal["cpu", "cuda"]

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure torch's allocator on GPUs."""


@dataclass(frozen=True)
class WeightBackend:
    """One row: how weights leave the policy, and how they arrive in an engine."""

    name: TransferBackend
    summary: str
    """What it does, in the spec's reference."""
    receiver: str
    """Path of the class that loads the weights in vLLM's processes, a `LoadingEngine`."""
    publisher: str | None = None
    """Path of a function of `RankWeights` and the run's id that returns the writer of a file, which engines read."""
    sender: str | None = None
    """Path of the class that sends from device to device, a `DeviceSender`; either this or `publisher` is set."""
    stores: bool = False
    """Whether the file goes to other nodes through an object store (`weight_sync.url`)."""
    check: str | None = None
    """Path of a function that refuses environment variables with which the policy cannot send, with ValueError."""
    devices: frozenset[_Device] = frozenset({"cpu", "cuda"})
    """Where rollout and policy can be."""
    shared_gpu: bool | None = None
    """Whether rollout has to be on the policy's GPUs, or None if it can be anywhere."""
    automatic: _Device | None = None
    """The device on which `auto` chooses this back-end, if `shared_gpu` allows it."""
    engine_buckets: int = 0
    """Buckets of weights that each process of an engine holds during a transfer."""
    sender_buckets: int = 0
    """Buckets of weights that a sending rank of the policy holds."""
    every_rank_sends: bool = False
    """Whether all ranks of the policy send, not only the first."""

    @property
    def writes_file(self) -> bool:
        """Whether the weights are a file that engines read."""
        return self.publisher is not None


_VLLM = "troupe.workers.weights.vllm_transfer"
_SENDERS = "troupe.workers.weights.device_sender"

BACKENDS: dict[TransferBackend, WeightBackend] = {
    row.name: row
    for row in (
        WeightBackend(
            name="shm",
            summary="a file in shared memory, which every engine of the node maps; other nodes get it over the network",
            publisher="troupe.workers.weights.file:shared_memory_publisher",
            receiver=f"{_VLLM}:FileWeightTransferEngine",
            automatic="cpu",
        ),
        WeightBackend(
            name="nccl",
            summary="broadcasts from GPU to GPU",
            sender=f"{_SENDERS}:GroupSender",
            receiver=f"{_VLLM}:GroupWeightTransferEngine",
            devices=frozenset({"cuda"}),
            shared_gpu=False,
            automatic="cuda",
            engine_buckets=2,
            sender_buckets=2,
        ),
        WeightBackend(
            name="ipc",
            summary="engines read from the policy's memory on the same GPU",
            sender=f"{_SENDERS}:SharedGpuSender",
            receiver=f"{_VLLM}:SharedGpuWeightTransferEngine",
            check="troupe.workers.weights.gpu_handles:check_allocator",
            devices=frozenset({"cuda"}),
            shared_gpu=True,
            automatic="cuda",
            engine_buckets=2,
            sender_buckets=2,
            every_rank_sends=True,
        ),
        WeightBackend(
            name="gloo",
            summary="broadcasts from CPU to CPU, as nccl does from GPU to GPU",
            sender=f"{_SENDERS}:GroupSender",
            receiver=f"{_VLLM}:GroupWeightTransferEngine",
            devices=frozenset({"cpu"}),
            engine_buckets=2,
            sender_buckets=2,
        ),
        WeightBackend(
            name="store",
            summary="as shm, but other nodes get the file from an object store (`url`)",
            publisher="troupe.workers.weights.file:shared_memory_publisher",
            receiver=f"{_VLLM}:FileWeightTransferEngine",
            stores=True,
        ),
    )
}


def automatic_backend(device: _Device, shared_gpu: bool) -> WeightBackend:
    """The back-end that `auto` stands for; `shared_gpu`: whether rollout is on the policy's GPUs."""
    chosen = (row for row in BACKENDS.values() if row.automatic == device)
    return next(row for row in chosen if row.shared_gpu in (None, shared_gpu))


def backend_problem(backend: TransferBackend, device: _Device, shared_gpu: bool) -> str | None:
    """Why a back-end cannot be used, as text, or None if it can be; arguments as in `automatic_backend`."""
    row = BACKENDS[backend]
    instead = " or ".join(other.name for other in BACKENDS.values() if other.automatic == device)
    if device not in row.devices and device == "cpu":
        return f"{backend} needs GPUs; on the CPU use {instead} (or auto)"
    if device not in row.devices:
        return f"{backend} sends between CPUs; on GPUs use {instead} (or auto)"
    if row.shared_gpu is True and not shared_gpu:
        return f"{backend} needs rollout on the policy's GPUs (roles.rollout.colocate_with: policy)"
    if row.shared_gpu is False and shared_gpu:
        instead = automatic_backend(device, shared_gpu).name
        return f"{backend} needs rollout and policy on separate GPUs; here use {instead} (or auto)"
    return None


def describe_backends() -> str:
    """The values of the spec's field, as text."""
    shared, apart = automatic_backend("cuda", shared_gpu=True).name, automatic_backend("cuda", shared_gpu=False).name
    cpu = automatic_backend("cpu", shared_gpu=False).name
    values = "; ".join(f"{row.name}: {row.summary}" for row in BACKENDS.values())
    return f"`auto`: {cpu} on the CPU, {shared} where rollout and policy share GPUs, {apart} otherwise. {values}."

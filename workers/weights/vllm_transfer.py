"""Weights into vLLM: engines for its weight-transfer interface that load a file or receive from device to device.

vLLM imports this module in each of its worker processes before it loads the model, because `EngineExtension` is the
`worker_extension_cls`. The import registers the engines, makes a child of a rollout worker exit with that worker, lets
it write its stacks on SIGUSR1, and speeds up the output head on the CPU.
"""

from __future__ import annotations

import mmap
import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from pydantic import TypeAdapter
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

from troupe.workers.contract.messages import WeightUpdate
from troupe.workers.contract.weight_backends import BACKENDS
from troupe.workers.engine.kept_tokens import record_kept_tokens
from troupe.workers.engine.process import OWNER_VARIABLE, die_with_owner
from troupe.workers.engine.settings import receiver_name
from troupe.workers.telemetry.stacks import write_stacks_on_signal
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.weights.buckets import Bucket, buckets_of, checksums, unpack, weights_digest
from troupe.workers.weights.cpu_kernels import logits_in_blocks, multiply_single_tokens_alike
from troupe.workers.weights.file import DTYPES, MappedWeights, WeightDigestMismatch, open_weights
from troupe.workers.weights.gpu_handles import gpu_id, open_handle
from troupe.workers.weights.reload import ModelReload
from troupe.workers.weights.shared_memory import FileMapping
from troupe.workers.weights.transfer_group import TransferGroup, connect_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


InitT = TypeVar("InitT", bound=WeightTransferInitInfo)
UpdateT = TypeVar("UpdateT", bound=WeightTransferUpdateInfo)


class LoadedWeights(TypedDict):
    """Weights that one worker process of an engine holds; sent as msgpack."""

    version: int | None
    """None for the initial weights, or a mixture after a failed update."""
    digest: str
    mismatch: str
    """Actual digest of the last update, if it was not the published one."""


_MESSAGE = TypeAdapter(WeightUpdate)


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A message as it arrives through vLLM's msgpack."""

    fields: dict[str, Any]
    """The message, as `asdict` makes it."""

    def update(self) -> WeightUpdate:
        return _MESSAGE.validate_python(self.fields)


class LoadingEngine(WeightTransferEngine[InitT, UpdateT]):
    """Loads updates into the model and reports which weights it holds."""

    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reload = ModelReload(model, self.model_config)
        self.loaded = LoadedWeights(version=None, digest="", mismatch="")

    def forget(self) -> None:
        """Report no weights, and end an update whose sender is gone: during one, the model's tensors have no memory."""
        self.loaded = LoadedWeights(version=None, digest="", mismatch="")
        self._reload.abandon()


class FileReader(LoadingEngine[WeightTransferInitInfo, FileUpdateInfo]):
    """Loads what a published file holds, after its digest has been verified."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._mapping = FileMapping(mmap.PROT_READ)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Does nothing: no preparation is needed."""

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` has received all of an update, or has raised."""

    def shutdown(self) -> None:
        self._mapping.drop()

    @contextmanager
    def _verified(self, update: WeightUpdate) -> Iterator[MappedWeights]:
        """The file of an update. Raises WeightDigestMismatch, after noting the digest that it has."""
        try:
            with open_weights(update, self._mapping) as weights:
                weights.verify()
                yield weights
        except WeightDigestMismatch as error:
            self.loaded["mismatch"] = error.got
            raise


class FileWeightTransferEngine(FileReader):
    """Loads a verified weight file into the running model: a corrupted update leaves the old weights in place."""

    def start_weight_update(self) -> None:
        """Clear the last failure. The layerwise reload starts after the file has been verified."""
        self.loaded["mismatch"] = ""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Verify and load an update. Raises WeightDigestMismatch if the file is not what was published,
        IncompleteUpdate if weights of the model are missing, and OSError if the file cannot be read."""
        update = update_info.update()
        with self._verified(update) as weights:
            self.loaded = LoadedWeights(version=None, digest="", mismatch="")
            self._reload.begin()
            try:
                self._reload.load(weights.tensors())
            except BaseException:
                self._reload.abandon()
                raise
            self._reload.end()
        self.loaded = LoadedWeights(version=update.version, digest=update.digest, mismatch="")


@dataclass
class DeviceInitInfo(WeightTransferInitInfo):
    """Data that a `DeviceSender` sends the engines when they join."""

    tensors: list[tuple[str, str, list[int]]]
    """Name, type and whole shape of every tensor, in the order in which they are sent."""
    bucket_bytes: int
    address: str = ""
    """Host of the transfer group's store."""
    port: int = 0
    first_rank: int = 0
    """Rank of this engine's first process in the transfer group."""
    world_size: int = 0

    def buckets(self) -> tuple[Bucket, ...]:
        shapes = [(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in self.tensors]
        return buckets_of(shapes, self.bucket_bytes)


@dataclass
class DeviceUpdateInfo(WeightTransferUpdateInfo):
    """The version whose buckets come from a device."""

    version: int


@dataclass
class SharedGpuUpdateInfo(DeviceUpdateInfo):
    """One bucket that lies in a buffer on this GPU."""

    bucket: int
    handles: dict[str, list[Any]]
    """Handle of the buffer on each GPU, by the GPU's id."""


class DeviceWeightTransferEngine(LoadingEngine[DeviceInitInfo, UpdateT]):
    """Loads weights from a `DeviceSender`, and computes their checksums. After a failure the model is a mixture of
    versions: the worker stays closed until an update succeeds."""

    init_info_cls = DeviceInitInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._buckets: tuple[Bucket, ...] = ()
        self._version: int | None = None
        self._sums: list[torch.Tensor] = []

    def init_transfer_engine(self, init_info: DeviceInitInfo) -> None:
        """Join the sender, and leave the previous one."""
        self.shutdown()
        self._buckets = init_info.buckets()

    def start_weight_update(self) -> None:
        self.loaded = LoadedWeights(version=None, digest="", mismatch="")
        self._version, self._sums = None, []
        self._reload.begin()

    def receive_weights(self, update_info: UpdateT) -> None:
        """Receive buckets and load them. Raises TransferFailed if the sender is gone, failed, or does not answer."""
        try:
            self._receive(update_info)
        except BaseException:
            self.shutdown()  # the sender, which waits for this process, fails as well
            self._reload.abandon()
            raise

    def finish_weight_update(self) -> None:
        """End the update. Raises IncompleteUpdate if weights of the model are missing."""
        self._reload.end()
        digest = weights_digest(self._buckets, self._sums)
        self.loaded = LoadedWeights(version=self._version, digest=digest, mismatch="")

    def shutdown(self) -> None:
        """Leave the sender."""

    @abstractmethod
    def _receive(self, update_info: UpdateT) -> None:
        """Receive buckets, and `_load` each of them."""

    def _load(self, bucket: Bucket, packed: torch.Tensor) -> None:
        self._sums.append(checksums(bucket, packed))
        self._reload.load(unpack(bucket, packed))


class GroupWeightTransferEngine(DeviceWeightTransferEngine[DeviceUpdateInfo]):
    """Receives all buckets in one transfer group with the sender."""

    update_info_cls = DeviceUpdateInfo
    _group: TransferGroup | None = None

    def init_transfer_engine(self, init_info: DeviceInitInfo) -> None:
        super().init_transfer_engine(init_info)
        store = connect_store(init_info.address, init_info.port)
        rank = init_info.first_rank + self.parallel_config.rank
        self._group = TransferGroup(store, rank, init_info.world_size, self.device)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _receive(self, update_info: DeviceUpdateInfo) -> None:
        self._version = update_info.version
        if self._group is None:
            raise RuntimeError("this engine has not joined a transfer group")
        for bucket in self._buckets:
            # A new buffer for each: tensors are read until their layer is complete.
            packed = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
            self._group.broadcast(packed)()
            self._load(bucket, packed)


class SharedGpuWeightTransferEngine(DeviceWeightTransferEngine[SharedGpuUpdateInfo]):
    """Copies one bucket after another from a buffer on its own GPU."""

    update_info_cls = SharedGpuUpdateInfo

    def _receive(self, update_info: SharedGpuUpdateInfo) -> None:
        self._version = update_info.version
        own, handles = gpu_id(self.device), update_info.handles
        if own not in handles:
            raise RuntimeError(f"no trainer has a buffer on this engine's GPU {own}, only on {', '.join(handles)}")
        packed = open_handle(handles[own], self.device).clone()
        torch.cuda.current_stream().synchronize()  # the sender writes the next bucket to the same buffer
        self._load(self._buckets[update_info.bucket], packed)


class EngineExtension:
    """Methods that vLLM adds to its worker class, reachable through `collective_rpc`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None
    vllm_config: VllmConfig
    model_runner: Any
    _weight_update_active: bool

    def troupe_forget_unfinished_update(self) -> None:
        """Allow a new update although the caller of the last one disappeared before its end."""
        self._weight_update_active = False

    def troupe_forget_weights(self) -> None:
        """Report no weights and end an unfinished update, because the weights are about to be discarded."""
        self._weight_update_active = False
        if isinstance(self.weight_transfer_engine, LoadingEngine):
            with set_current_vllm_config(self.vllm_config):
                self.weight_transfer_engine.forget()

    def troupe_loaded_weights(self) -> LoadedWeights:
        if not isinstance(self.weight_transfer_engine, LoadingEngine):
            raise RuntimeError("this engine has no back-end that reports the weights it loaded")
        return self.weight_transfer_engine.loaded

    def troupe_record_kept_tokens(self) -> None:
        """Make the model runner record kept tokens; see `record_kept_tokens`."""
        record_kept_tokens(self.model_runner)

    def troupe_gpu_peak(self) -> int:
        """Peak bytes that torch has allocated on this process's GPU."""
        return torch.cuda.max_memory_allocated()


def _announce_activities() -> None:
    """Announce what the engine of the rollout worker named in the environment does until it serves."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    announce(Activity.MODEL, owner)
    create = WeightTransferEngineFactory.create_engine

    def create_engine(*args: Any, **kwargs: Any) -> WeightTransferEngine[Any, Any]:
        # vLLM creates it between loading the model and its warm-up: it profiles, and compiles or captures graphs.
        announce(Activity.WARM_UP, owner)
        return create(*args, **kwargs)

    WeightTransferEngineFactory.create_engine = create_engine


for _row in BACKENDS.values():
    WeightTransferEngineFactory.register_engine(receiver_name(_row.name), *_row.receiver.split(":"))
die_with_owner()
write_stacks_on_signal()
logits_in_blocks()
if current_platform.is_cpu():
    multiply_single_tokens_alike()
_announce_activities()

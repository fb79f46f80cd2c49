"""Weights into vLLM: a shared-memory engine for vLLM's weight-transfer interface, and senders for its GPU back-ends.

vLLM imports this module in each of its worker processes, before the model is loaded, because `EngineExtension` is
named as `worker_extension_cls`. Importing it registers the engine and, in a child of a rollout worker, ties the
process to that worker's life.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from workers.messages import TensorSpec, WeightUpdate
from workers.shared_file import FileMapping
from workers.weight_file import WeightDigestMismatch, open_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

BACKEND = "troupe_shm"
OWNER_VARIABLE = "TROUPE_ENGINE_OWNER"


class IncompleteUpdate(RuntimeError):
    """The update did not contain every weight of the model."""


class LoadedWeights(TypedDict):
    """What one worker process of an engine holds; travels as msgpack."""

    version: int | None
    """None: the weights the engine started with, or a mixture that a failed update left."""
    digest: str
    mismatch: str
    """Digest that the last update really had, where it was not the published one."""


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """The shared-memory engine needs no rendezvous."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """A :class:`~workers.messages.WeightUpdate` as it arrives through vLLM's msgpack (its `asdict`)."""

    version: int
    digest: str
    path: str
    host: str
    tensors: list[dict[str, Any]]
    nbytes: int

    def update(self) -> WeightUpdate:
        """The message itself."""
        specs = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in self.tensors)
        return WeightUpdate(self.version, self.digest, self.path, self.host, specs, self.nbytes)


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads a verified weight file into the running model.

    Nothing of the model is touched before the digest has been found right, so an update that did not arrive well
    leaves the old weights in place.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied_heads = _tied_heads(model)
        self._mapping = FileMapping(mmap.PROT_READ)
        self.loaded = LoadedWeights(version=None, digest="", mismatch="")

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Only forget the last failure: the layerwise reload starts after the file has been verified."""
        self.loaded["mismatch"] = ""

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` ends with a complete model, or raises."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Verify, then load; raises WeightDigestMismatch, IncompleteUpdate, or what reading the file raises."""
        update = update_info.update()
        try:
            with open_weights(update, self._mapping) as weights:
                weights.verify()
                self.loaded = LoadedWeights(version=None, digest="", mismatch="")
                self._load(weights.tensors())
        except WeightDigestMismatch as error:
            self.loaded["mismatch"] = error.got
            raise
        self.loaded = LoadedWeights(version=update.version, digest=update.digest, mismatch="")

    def shutdown(self) -> None:
        """Let go of the file."""
        self._mapping.drop()

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
            missing = _missing_layers(self.model, self._tied_heads)
        finally:
            # Also after a failure: it puts modules back that a later, good update can load into.
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_heads(self.model)
        if missing:
            raise IncompleteUpdate(f"the update has no or not all weights of {', '.join(missing)}")


def _heads(model: torch.nn.Module) -> Iterator[tuple[str, ParallelLMHead]]:
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            yield name, module


def _tied_heads(model: torch.nn.Module) -> frozenset[str]:
    """Names of the output heads whose weight is the embedding's."""
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding | torch.nn.Embedding)]
    return frozenset(
        name for name, head in _heads(model) if any(m is not head and m.weight is head.weight for m in embeddings)
    )


def _repack_heads(model: torch.nn.Module) -> None:
    """Prepack every output head from its weight again.

    On the CPU a head multiplies by a packed copy. A tied head gets its new weight through the embedding and the
    reload does not notice, so that the copy would keep the old policy's last layer, and nothing would say so.
    """
    for _, head in _heads(model):
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


def _missing_layers(model: torch.nn.Module, tied_heads: frozenset[str]) -> list[str]:
    """Modules that the reload still waits for: vLLM itself only logs a warning and keeps their old weights.

    Attention layers are processed at the end by design, a tied head has no weights of its own, and the rows that
    pad a vocabulary never arrive.
    """
    missing = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if name in tied_heads or not info.can_load() or is_deferred_attention_layer(module):
            continue
        if all(parameter is None for parameter in module._parameters.values()):
            continue
        if isinstance(module, VocabParallelEmbedding) and info.load_numel > 0:
            continue
        missing.append(name)
    return missing


class EngineExtension:
    """Methods that vLLM adds to its worker class, reachable through `collective_rpc`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None
    _weight_update_active: bool

    def troupe_forget_unfinished_update(self) -> None:
        """Let an update begin although the last one's caller was gone before it ended."""
        self._weight_update_active = False

    def troupe_loaded_weights(self) -> LoadedWeights:
        """This process's own word on what it holds (shared-memory back-end)."""
        if not isinstance(self.weight_transfer_engine, ShmWeightTransferEngine):
            raise RuntimeError(f"only the {BACKEND} back-end knows what it loaded")
        return self.weight_transfer_engine.loaded

    def troupe_gpu_peak(self) -> int:
        """Most bytes that torch has allocated on this process's GPU."""
        return torch.cuda.max_memory_allocated()


class IterableSource(WeightSource):
    """A vLLM WeightSource of weights whose names, types and shapes are known beforehand."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        shapes: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    ) -> None:
        """`tensors` starts a fresh pass; `shapes` must agree with it, in order: vLLM's senders check it."""
        self._tensors = tensors
        self._metadata = [ParamMeta(name, dtype, shape) for name, dtype, shape in shapes]

    def metadata(self) -> list[ParamMeta]:
        """Names, types and full shapes, without gathering anything."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors())


def nccl_sender(
    source: WeightSource, client: VLLMWeightSyncClient, rank: int, address: str, port: int, world_size: int
) -> TrainerWeightTransferEngine[Any]:
    """Sender that broadcasts over NCCL from rank 0 to every engine process. Untried on a GPU.

    Call it, and `send_weights()` on the result, on every trainer rank; only rank 0 uses `client`, which must let the
    engines meet at `address:port`. `world_size` counts the sender and all engine processes.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=world_size)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def ipc_sender(source: WeightSource, client: VLLMWeightSyncClient, rank: int) -> TrainerWeightTransferEngine[Any]:
    """Sender that hands CUDA memory of this GPU to an engine process on the same GPU. Untried on a GPU.

    Called like :func:`nccl_sender`. Packed: one handle for a bounded staging buffer at a time. The handles are tuples
    of plain values and types; where vLLM's msgpack refuses one of them, the engine raises and the old weights stay.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    info = IPCTrainerInitInfo(rank=rank, packed=True)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def die_with_owner() -> None:
    """Exit, with the engine core between, as soon as the rollout worker named in the environment is gone.

    vLLM's engine core outlives a killed parent and keeps memory and cores. A pidfd becomes readable when its process
    ends, and never means another process that got the same number.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        owner_fd = os.pidfd_open(owner)
        between = [os.pidfd_open(pid) for pid in _ancestors_below(owner)]
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(owner_fd, between), name="die-with-owner", daemon=True).start()


def _ancestors_below(owner: int) -> list[int]:
    """Processes between this one and its ancestor `owner`; none where `owner` is no ancestor."""
    between: list[int] = []
    pid = os.getppid()
    while pid > 1:
        if pid == owner:
            return between
        between.append(pid)
        with open(f"/proc/{pid}/stat", "rb") as stat:
            pid = int(stat.read().rpartition(b")")[2].split()[1])
    return []


def _exit_after(owner_fd: int, between: list[int]) -> None:
    waiting = select.poll()
    waiting.register(owner_fd, select.POLLIN)
    waiting.poll()
    for fd in between:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(1)


# It warns of every module that is tied or has only buffers; what is really missing raises IncompleteUpdate.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
die_with_owner()

"""Weights into vLLM: a shared-memory engine for vLLM's weight-transfer interface, and senders for its GPU backends.

vLLM imports this module in each of its worker processes before it loads the model, because `EngineExtension` is the
`worker_extension_cls`. The import registers the engine, makes a child of a rollout worker exit with that worker, and
lets it write its stacks on SIGUSR1.
"""

from __future__ import annotations

import logging
import mmap
import os
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

from troupe.workers.contract.messages import TensorSpec, WeightUpdate
from troupe.workers.engine.owner_watch import OWNER_VARIABLE, die_with_owner
from troupe.workers.engine.settings import SHM_BACKEND
from troupe.workers.telemetry.stacks import write_stacks_on_signal
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.weights.file import WeightDigestMismatch, open_weights
from troupe.workers.weights.shared_memory import FileMapping

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


class IncompleteUpdate(RuntimeError):
    """The update did not contain every weight of the model."""


class LoadedWeights(TypedDict):
    """Weights that one worker process of an engine holds; sent as msgpack."""

    version: int | None
    """None: the initial weights, or a mixture after a failed update."""
    digest: str
    mismatch: str
    """Actual digest of the last update, if it was not the published one."""


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """The shared-memory engine needs no rendezvous."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """A :class:`~troupe.workers.contract.messages.WeightUpdate` as it arrives through vLLM's msgpack (as `asdict`)."""

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

    The model changes only after the digest has been verified: a corrupted update leaves the old weights in place.
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
        """Clear the last failure. The layerwise reload starts after the file has been verified."""
        self.loaded["mismatch"] = ""

    def finish_weight_update(self) -> None:
        """Nothing to do: `receive_weights` ends with a complete model or raises."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Verify and load an update.

        Raises:
            WeightDigestMismatch: the file is not what was published.
            IncompleteUpdate: weights of the model are missing.
            OSError: the file cannot be read.
        """
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
        """Release the file."""
        self._mapping.drop()

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
            missing = _missing_layers(self.model, self._tied_heads)
        finally:
            # After a failure too: it restores the modules that a later update loads into.
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_heads(self.model)
        if missing:
            raise IncompleteUpdate(f"the update lacks weights of {', '.join(missing)}")


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
    """Repack every output head from its weight.

    On the CPU a head multiplies by a packed copy. A tied head gets its new weight through the embedding, which the
    reload does not notice: without this, the copy would silently keep the last layer of the old policy.
    """
    for _, head in _heads(model):
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


def _missing_layers(model: torch.nn.Module, tied_heads: frozenset[str]) -> list[str]:
    """Modules that the reload still waits for. vLLM only logs a warning and keeps their old weights.

    Attention layers are processed at the end by design, a tied head has no separate weights, and the rows that pad a
    vocabulary are not part of an update.
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
        """Allow a new update although the caller of the last one disappeared before its end."""
        self._weight_update_active = False

    def troupe_loaded_weights(self) -> LoadedWeights:
        """Weights that this process holds (shared-memory backend)."""
        if not isinstance(self.weight_transfer_engine, ShmWeightTransferEngine):
            raise RuntimeError(f"only the {SHM_BACKEND} backend reports the weights it loaded")
        return self.weight_transfer_engine.loaded

    def troupe_gpu_peak(self) -> int:
        """Peak bytes that torch has allocated on this process's GPU."""
        return torch.cuda.max_memory_allocated()


class IterableSource(WeightSource):
    """A vLLM WeightSource of weights whose names, types and shapes are known in advance."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        shapes: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    ) -> None:
        """`tensors` starts a new pass. `shapes` must match it in order; vLLM's senders check this."""
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
    """Sender that broadcasts over NCCL from rank 0 to every engine process. Untested on GPU.

    Call it, and `send_weights()` on the result, on every trainer rank.

    Args:
        source: The weights.
        client: The engines; only rank 0 uses it.
        rank: Rank of this trainer process.
        address: Host of the transfer group's store.
        port: Port of the store.
        world_size: Number of processes in the transfer group: the sender and all engine processes.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=world_size)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def ipc_sender(source: WeightSource, client: VLLMWeightSyncClient, rank: int) -> TrainerWeightTransferEngine[Any]:
    """Sender that shares CUDA memory of this GPU with an engine process on the same GPU. Untested on GPU.

    Called like :func:`nccl_sender`. Packed: one handle at a time, for a staging buffer of bounded size. The handles are
    tuples of plain values and types; if vLLM's msgpack refuses one of them, the engine raises and the old weights stay.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    info = IPCTrainerInitInfo(rank=rank, packed=True)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


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


# vLLM warns of every module that is tied or has only buffers. Weights that are really missing raise IncompleteUpdate.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine(SHM_BACKEND, ShmWeightTransferEngine)
die_with_owner()
write_stacks_on_signal()
_announce_activities()

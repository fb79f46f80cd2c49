"""ZeRO-3 from the first tensor on: a model is partitioned while it is read, and a frozen model runs partitioned.

DeepSpeed alone would take the whole model on every rank, and put it on every GPU, before it partitions it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from troupe.workers.contract.config import REDUCE_BUCKET
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.models.cpu import return_large
from troupe.workers.models.modeling import ModelModule, torch_dtype
from troupe.workers.models.partitioned import is_partitioned
from troupe.workers.training.group import import_deepspeed
from troupe.workers.training.optimizer import deepspeed_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable of transformers. Its threads would read, and convert to another type, ahead of what is used."""


def partitioner_for(model: ModelConfig, trainer: TrainerConfig) -> ZeroPartitioner | None:
    """Partitions the model while it is loaded; None unless the trainer uses ZeRO-3. The group must have been joined."""
    stage = trainer.stage_for(dist.get_world_size(), model.dtype == "float32")
    return ZeroPartitioner(trainer, torch_dtype(model.dtype)) if stage == 3 else None


class ZeroPartitioner:
    """A `Partitioner` of DeepSpeed: every rank copies its part out of memory-mapped files. Whole tensors, one at a
    time, are read only if transformers converts them: to another type, or several to one (fused experts)."""

    def __init__(self, trainer: TrainerConfig, dtype: torch.dtype) -> None:
        self._zero: Any = import_deepspeed().zero
        self._config = deepspeed_config(trainer, 3, dtype, REDUCE_BUCKET)
        self._init = self._zero.Init(config_dict_or_path=self._config)
        self._dtype = dtype
        self._whole: list[nn.Parameter] = []

    @contextlib.contextmanager
    def reading(self, folder: str, vocabulary: int) -> Iterator[None]:
        """Read the model's files in the block; see `Partitioner.reading`."""
        return_large()
        files = WeightMappings(folder)
        before = os.environ.get(_ONE_AT_A_TIME)
        os.environ[_ONE_AT_A_TIME] = "1"
        hook = register_module_parameter_registration_hook(partial(self._take, files, vocabulary))
        try:
            yield
        finally:
            hook.remove()
            if before is None:
                del os.environ[_ONE_AT_A_TIME]
            else:
                os.environ[_ONE_AT_A_TIME] = before

    def _take(
        self, files: WeightMappings, vocabulary: int, _module: nn.Module, _name: str, parameter: nn.Parameter
    ) -> None:
        """Called for every parameter that is assigned to a module, including parameters read from a file."""
        if not getattr(parameter, "_is_hf_initialized", False) or parameter.is_meta or is_partitioned(parameter):
            return
        if parameter.shape[:1] == (vocabulary,):
            self._whole.append(parameter)
        else:
            self._partition(parameter)
        files.release()

    def _partition(self, parameter: nn.Parameter) -> None:
        """Keep this rank's part of a parameter that every rank has read. Ranks need not wait for each other."""
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(self._dtype)  # as DeepSpeed converts a whole model
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # pyright: ignore[reportAttributeAccessIssue]: DeepSpeed has just added it
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._init.local_device)

    def finish(self, model: PreTrainedModel) -> None:
        """Take parameters that were in no file, such as a new head, from rank 0; see `Partitioner.finish`."""
        read = {id(parameter) for parameter in self._whole}
        for parameter in model.parameters():
            if id(parameter) in read and not is_partitioned(parameter):
                self._partition(parameter)
        self._whole.clear()
        self._zero.Init(module=model, config_dict_or_path=self._config)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._init.local_device)


@dataclass(frozen=True)
class FrozenModule:
    """A module that is not trained, on its device."""

    module: ModelModule
    engine: Any = None
    """DeepSpeed's, if the module is partitioned. Without it the module could not run."""


def place_frozen(module: ModelModule, trainer: TrainerConfig, device: torch.device) -> FrozenModule:
    """Put a module that is not trained on the device; a partitioned one under DeepSpeed, which gathers every layer
    for its passes: all ranks must run equally often. Collective."""
    module.requires_grad_(False)
    if not any(is_partitioned(parameter) for parameter in module.parameters()):
        return FrozenModule(module.to(device))
    settings = trainer.model_copy(update={"offload_optimizer": False})
    config = deepspeed_config(settings, 3, module.model.dtype, REDUCE_BUCKET)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = import_deepspeed().initialize(model=module, config=config)
    return FrozenModule(module, engine)


_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4


class WeightMappings:
    """The weight files of a folder, as they are mapped from now on by a reader that does not write to its mappings."""

    def __init__(self, folder: str) -> None:
        self._inodes = {path.stat().st_ino for path in Path(folder).glob("*.safetensors")}
        self._before = set(self._mappings())

    def release(self) -> None:
        """Give back the pages that have been read. They are read again from the file if they are used again."""
        library = ctypes.CDLL(None)
        for start, end in set(self._mappings()) - self._before:
            # What was mapped before may have been written to, and would lose that.
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)

    def _mappings(self) -> Iterator[tuple[int, int]]:
        """First address, and the address after the last, of each mapping of the files; none if Linux has no list."""
        if not _MAPS.exists():
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            addresses, _, _, _, inode, *_ = line.split()
            if int(inode) in self._inodes:
                start, end = addresses.split("-")
                yield int(start, 16), int(end, 16)

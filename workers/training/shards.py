"""Reading of DeepSpeed's checkpoint files without running code from them.

DeepSpeed writes pickles, and its own loaders call whatever a file asks for. A manifest of hashes does not help against
those who can write to the folder: they can write the manifest, too. Here every file is read by torch's restricted
unpickler, which builds tensors, plain containers and the few types listed below, and calls nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_UNPICKLER = "WeightsUnpickler error:"
"""Behind it torch says why; before it, how to load the file without restrictions."""


def read_shard(file: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Contents of a file that DeepSpeed wrote, on the CPU.

    Args:
        file: The file.
        mapped: Map its tensors from disk instead of reading them.

    Raises:
        ValueError: it is damaged, or names a type that DeepSpeed does not write.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            found = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # torch raises many types for a damaged file
        raise ValueError(f"{file} cannot be read: {_reason(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} cannot be read: it holds a {type(found).__name__}, not the state of a trainer")
    return found


def restrict_loading(engine: Any) -> None:
    """Let a DeepSpeed engine read its checkpoints with `read_shard` only."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class RestrictedCheckpointEngine(TorchCheckpointEngine):
        """DeepSpeed's files, read without unpickling."""

        def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
            """Contents of one file, on the CPU: DeepSpeed copies what it needs to its device."""
            return read_shard(Path(path))

    engine.checkpoint_engine = RestrictedCheckpointEngine(engine._config)


@contextlib.contextmanager
def empty_writes(engine: Any) -> Iterator[None]:
    """Let a DeepSpeed engine write its checkpoint without the numbers, and read each file again.

    Raises:
        ValueError: A file holds what `read_shard` does not read.
    """
    own = engine.checkpoint_engine

    class EmptyCheckpointEngine(type(own)):
        """DeepSpeed's files with empty tensors."""

        def save(self, state_dict: dict[str, Any], path: str) -> None:
            """Write one file, and read it."""
            super().save(
                tree_map_only(torch.Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype), state_dict), path
            )
            self.load(path)

    engine.checkpoint_engine = EmptyCheckpointEngine(engine._config)
    try:
        yield
    finally:
        engine.checkpoint_engine = own


def save_trained_only(engine: Any) -> None:
    """Let a DeepSpeed engine save the parameters that train only.

    Its own option leaves frozen parameters out under one name, and saves those that are tied under the other.
    """
    state_of, module = engine.module_state_dict, engine.module

    def trained(*args: Any, **kwargs: Any) -> dict[str, Any]:
        names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in state_of(*args, **kwargs).items() if name in names}

    engine.module_state_dict = trained


def _reason(error: Exception) -> str:
    """What torch says in one line, without its advice to load the file unsafely."""
    said = str(error).rpartition(_UNPICKLER)[2]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0].partition(" Please use")[0] if lines else type(error).__name__

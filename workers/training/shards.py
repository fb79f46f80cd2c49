"""Reading of DeepSpeed's checkpoint files without running code from them.

DeepSpeed writes pickles, and its own loaders call whatever a file asks for. A manifest of hashes does not help against
those who can write to the folder: they can write the manifest, too. Here every file is read by torch's restricted
unpickler, which builds tensors, plain containers and the few types listed below, and calls nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch


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


Copy = Callable[[dict[str, Any]], dict[str, Any]]
"""Copies a state, so that the original may change."""


class ShardFiles(Protocol):
    """How a DeepSpeed engine reads and writes the files of its checkpoints."""

    def held(self, copy: Copy) -> AbstractContextManager[list[Callable[[], None]]]:
        """Inside the block what DeepSpeed saves is copied instead of written; yields what writes the copies."""
        ...


def restrict_loading(engine: Any) -> ShardFiles:
    """Let a DeepSpeed engine read its checkpoints with `read_shard` only; returns how it reads and writes them."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class RestrictedCheckpointEngine(TorchCheckpointEngine):
        """DeepSpeed's files, read without unpickling, and written at once or later."""

        _held: tuple[Copy, list[Callable[[], None]]] | None = None

        def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
            """Contents of one file, on the CPU: DeepSpeed copies what it needs to its device."""
            return read_shard(Path(path))

        def save(self, state_dict: dict[str, Any], path: str) -> None:
            """Write one file, or keep a copy of its contents."""
            if self._held is None:
                super().save(state_dict, path)
            else:
                copy, writes = self._held
                writes.append(partial(super().save, copy(state_dict), path))

        @contextmanager
        def held(self, copy: Copy) -> Iterator[list[Callable[[], None]]]:
            """See `ShardFiles.held`."""
            writes: list[Callable[[], None]] = []
            self._held = copy, writes
            try:
                yield writes
            finally:
                self._held = None

    files = RestrictedCheckpointEngine(engine._config)
    engine.checkpoint_engine = files
    return files


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
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((line for line in rest if not line.startswith(("Please file", "Check the doc"))), first)
    return said if first.startswith("Weights only load failed") else first

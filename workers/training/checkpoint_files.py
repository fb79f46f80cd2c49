"""Files of a trainer's checkpoint: names of the ranks' own, and DeepSpeed's, read without running code from them.

DeepSpeed writes pickles, and its own loaders call whatever a file names. A manifest of hashes does not help against
anyone who can write to the folder, including the manifest. Here every file is read by torch's restricted
unpickler, which builds tensors, plain containers and the few types listed below, and calls nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._pytree import tree_map_only

_ADVICE = "Weights only load failed"
"""Beginning of torch's advice to load the file without restrictions, which precedes the reason."""
_UNPICKLER = "WeightsUnpickler error:"
_RANK_FILE = re.compile(r"rank-\d{5}-of-(\d{5})\.safetensors")


def rank_file(directory: str, rank: int, world: int) -> Path:
    """Path of a rank's own file."""
    return Path(directory) / f"rank-{rank:05d}-of-{world:05d}.safetensors"


def rank_files(directory: str) -> list[Path]:
    """The own file of every rank that saved. Raises FileNotFoundError if one is missing."""
    found = [_RANK_FILE.fullmatch(path.name) for path in Path(directory).glob("rank-*")]
    worlds = {int(match[1]) for match in found if match}
    if len(worlds) != 1:
        raise FileNotFoundError(f"{directory} is not a checkpoint of one training group")
    world = worlds.pop()
    files = [rank_file(directory, rank, world) for rank in range(world)]
    for file in files:
        require(file, world)
    return files


def opened(file: Path) -> safe_open:
    """A rank's own file, open for reading. Raises ValueError if it is truncated or has another format."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def require(file: Path, world: int) -> None:
    """Raise FileNotFoundError if the file of a checkpoint of `world` ranks does not exist."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing from a checkpoint of {world} rank(s)")


def read_shard(file: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Contents of a file of DeepSpeed's, on the CPU; `mapped` from disk. Raises ValueError if damaged."""
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


class ShardFiles:
    """How the files of a DeepSpeed engine's checkpoints are written."""

    copying: tuple[Copy, list[Callable[[], None]]] | None = None
    """Makes copies of what is saved instead of writing it, and the functions that write them."""
    trying = False
    """Whether what is saved is written without its numbers, and read again."""

    @contextmanager
    def copied(self, copy: Copy) -> Iterator[list[Callable[[], None]]]:
        """Copy what DeepSpeed saves in the block instead of writing it; yields functions that write the copies."""
        writes: list[Callable[[], None]] = []
        self.copying = copy, writes
        try:
            yield writes
        finally:
            self.copying = None

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Write what DeepSpeed saves in the block without its numbers, and read it again. Raises ValueError."""
        self.trying = True
        try:
            yield
        finally:
            self.trying = False


def restrict_loading(engine: Any) -> ShardFiles:
    """Let a DeepSpeed engine read its checkpoints with `read_shard` only; returns how it reads and writes them."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class RestrictedCheckpointEngine(ShardFiles, TorchCheckpointEngine):
        """DeepSpeed's files, read without unpickling, and written at once or later."""

        def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
            """Contents of one file, on the CPU: DeepSpeed copies what it needs to its device."""
            return read_shard(Path(path))

        def save(self, state_dict: dict[str, Any], path: str) -> None:
            """Write one file, or keep a copy of its contents, or try whether it can be written."""
            if self.trying:
                empty = tree_map_only(torch.Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype), state_dict)
                super().save(empty, path)
                self.load(path)
            elif self.copying is None:
                super().save(state_dict, path)
            else:
                copy, writes = self.copying
                writes.append(partial(super().save, copy(state_dict), path))

    files = RestrictedCheckpointEngine(engine._config)
    engine.checkpoint_engine = files
    return files


def save_trained_only(engine: Any) -> None:
    """Let a DeepSpeed engine save trained parameters only; its own option treats tied ones inconsistently."""
    state_of, module = engine.module_state_dict, engine.module

    def trained(*args: Any, **kwargs: Any) -> dict[str, Any]:
        names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in state_of(*args, **kwargs).items() if name in names}

    engine.module_state_dict = trained


def _reason(error: Exception) -> str:
    """torch's reason in one line, without its advice to load the file unsafely."""
    said = str(error)
    if said.startswith(_ADVICE):
        said = said.rpartition(_UNPICKLER)[2] if _UNPICKLER in said else said.partition("\n")[2]
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("Please file")]
    return lines[0].partition(" Please use")[0] if lines else type(error).__name__

"""Loading of a DeepSpeed checkpoint that another number of ranks, or another kind of optimizer, wrote."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from troupe.workers.training.resharding import (
    ZERO_1_2,
    ZERO_3,
    Shapes,
    State,
    cut_groups,
    cut_parameters,
    flattened,
    opened,
    require,
    reshard,
    share,
    unflattened,
)
from troupe.workers.training.shards import read_shard


class ReshardingLoader:
    """Loads weights, optimizer and counters into a DeepSpeed engine, resharded for its group. Collective."""

    def __init__(self, engine: Any, stage: int, dtype: torch.dtype, *, whole: bool = True) -> None:
        """Set the engine to load into.

        Args:
            engine: DeepSpeed's engine.
            stage: Its ZeRO stage.
            dtype: Type of its weights.
            whole: Whether all weights were saved, not only the trained ones.
        """
        self._engine = engine
        self._stage = stage
        self._dtype = dtype
        self._whole = whole

    def load(self, folder: Path, ranks: int) -> None:
        """Load what another group wrote.

        Args:
            folder: Folder of DeepSpeed's files.
            ranks: Number of ranks that wrote them.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file cannot be read, or its contents do not fit the model.
        """
        optimizer, rank, world = self._engine.optimizer, dist.get_rank(), dist.get_world_size()
        of_model = folder / f"{'zero_pp_rank_0_' if self._stage == 3 else ''}mp_rank_00_model_states.pt"
        require(of_model, ranks)
        model, now = read_shard(of_model, mapped=True), self._shapes()
        if self._stage == 3:
            keys, cut = ZERO_3, cut_parameters(model["param_shapes"], now, rank, world)
        else:
            keys, cut = ZERO_1_2, cut_groups(now, self._widths(now), rank)
        current = optimizer.state_dict()[keys.adam] if self._stage > 0 else optimizer.state_dict()
        try:
            saved = self._saved(folder, ranks, of_model, model, now)
            state = reshard(saved, keys, cut, current["param_groups"])
        except ValueError as error:
            raise ValueError(f"{folder} cannot be resharded for {world} rank(s): {error}") from error
        # The same steps as in DeepSpeed's own loading.
        if self._stage == 3:
            optimizer.checkpoint_event_prologue()
        self._engine.load_module_state_dict(model, strict=self._whole)
        if self._stage == 0:
            optimizer.load_state_dict(unflattened(state[keys.adam], now))
        else:
            optimizer.load_state_dict([state] * world, load_from_fp32_weights=True)
        if self._stage == 3:
            optimizer.checkpoint_event_epilogue()
        self._engine.global_steps = model["global_steps"]
        self._engine.global_samples = model["global_samples"]
        self._engine.skipped_steps = model["skipped_steps"]

    def _saved(self, folder: Path, ranks: int, of_model: Path, model: dict[str, Any], now: Shapes) -> list[State]:
        """Optimizer state of each rank that saved, in ZeRO's layout. `model`: the contents of `of_model`."""
        whole = model["optimizer"] is not None
        before = _of_module(model["module"], now) if whole else model["param_shapes"]
        if _all(before) != _all(now):
            raise ValueError(f"{of_model} has other parameters than the model")
        if whole:
            return [self._engine.optimizer.state_dict() | flattened(model["optimizer"], model["module"], now)]
        kind = "bf16_" if self._dtype == torch.bfloat16 else ""
        files = [folder / f"{kind}zero_pp_rank_{saved}_mp_rank_00_optim_states.pt" for saved in range(ranks)]
        for file in files:
            require(file, ranks)
        return [read_shard(file, mapped=True)["optimizer_state_dict"] for file in files]

    def _shapes(self) -> Shapes:
        """Name and whole shape of every parameter of each optimizer group, in order."""
        if self._stage > 0:
            return self._engine._get_zero_param_shapes()
        names = {parameter: name for name, parameter in self._engine.module.named_parameters()}
        return [{names[p]: tuple(p.shape) for p in group["params"]} for group in self._engine.optimizer.param_groups]

    def _widths(self, shapes: Shapes) -> list[int]:
        """Elements of each group that this rank holds, ZeRO's padding included."""
        if self._stage > 0:
            return [group["params"][0].numel() for group in self._engine.optimizer.param_groups]
        return [sum(map(math.prod, group.values())) for group in shapes]


def reshard_average(
    files: Sequence[Path], parameters: Sequence[nn.Parameter], average: Sequence[torch.Tensor], stage: int
) -> list[torch.Tensor]:
    """This rank's part of the moving average that other ranks wrote, read one parameter at a time.

    Args:
        files: The own file of every rank that saved.
        parameters: The parameters that are averaged.
        average: What this rank holds of the average now: one tensor for each parameter, or none.
        stage: The ZeRO stage.
    """
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(opened(file)) for file in files]
        names = [f"average.{number}" for number in range(len(average))]
        if stage < 3:
            return [handles[0].get_tensor(name) for name in names]
        sizes = [getattr(parameter, "ds_numel") for parameter in parameters]  # noqa: B009
        return [
            share([file.get_tensor(name) for file in handles], size, dist.get_rank(), part.numel())
            for name, size, part in zip(names, sizes, average, strict=False)  # `average` is empty or has all of them
        ]


def _all(groups: Sequence[Mapping[str, Sequence[int]]]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter, in the order of flattening."""
    return [(name, tuple(shape)) for group in groups for name, shape in group.items()]


def _of_module(module: Mapping[str, torch.Tensor], names: Shapes) -> Shapes:
    """Shapes of the named tensors that the module has."""
    return [{name: tuple(module[name].shape) for name in group if name in module} for group in names]

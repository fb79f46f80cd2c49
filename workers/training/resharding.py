"""Resharding of a checkpoint: weights and optimizer of one rank, from what a group of another size or kind saved.

ZeRO cuts a tensor into equal shares, one per rank, padded at the end. ZeRO 1 and 2 cut the concatenation of all
parameters of an optimizer group, ZeRO 3 each parameter. A rank keeps the concatenation of its shares of a group in flat
tensors: one of float32 weights and one of each moment of Adam. (See DeepSpeed's runtime/zero/stage_1_and_2.py and
stage3.py, and checkpoint/ds_to_universal.py, which reads them.) A single rank may have an Adam that is neither cut nor
flattened.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from troupe.workers.training.checkpoint_files import opened, read_shard, require

State = dict[str, Any]
"""State of one rank's optimizer, as DeepSpeed saves it."""
Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""Whole shape of every parameter by name, one mapping per group, in the order of flattening."""
Cut = Callable[[Sequence[Sequence[torch.Tensor]]], list[torch.Tensor]]
"""Cuts this rank's flat tensors, one per group, from the tensors of every rank that saved."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateKeys:
    """Keys of the parts of an optimizer's state that are resharded."""

    adam: str
    weights: str


ZERO_1_2 = StateKeys("base_optimizer_state", "single_partition_of_fp32_groups")
ZERO_3 = StateKeys("optimizer_state_dict", "fp32_flat_groups")


def share(shards: Sequence[torch.Tensor], size: int, rank: int, width: int) -> torch.Tensor:
    """A rank's share of `width` elements of a tensor cut into `shards`, zeros beyond `size`. Raises ValueError."""
    held = sum(shard.numel() for shard in shards)
    if held < size:
        raise ValueError(f"the shards have {held} elements, expected at least {size}")
    first, end = min(rank * width, size), min((rank + 1) * width, size)
    pieces, start = [], 0
    for shard in shards:
        pieces.append(shard[max(first - start, 0) : max(end - start, 0)])
        start += shard.numel()
    return torch.cat([*pieces, shards[0].new_zeros(width - (end - first))])


def cut_groups(shapes: Shapes, widths: Sequence[int], rank: int) -> Cut:
    """ZeRO 1 and 2: a share of each group. `widths`: elements of a share in the current group, by optimizer group."""

    def cut(saved: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        return [
            share([flats[number] for flats in saved], sum(map(math.prod, group.values())), rank, width)
            for number, (group, width) in enumerate(zip(shapes, widths, strict=True))
        ]

    return cut


def cut_parameters(before: Shapes, now: Shapes, rank: int, world: int) -> Cut:
    """ZeRO 3: a share of each parameter. The groups may differ: DeepSpeed splits them if shares are large."""

    def cut(saved: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        shards: dict[str, list[torch.Tensor]] = {}
        for flats in saved:
            for flat, group in zip(flats, before, strict=True):
                widths = [parameter_width(shape, len(saved)) for shape in group.values()]
                if flat.numel() != sum(widths):
                    raise ValueError(f"a flat tensor has {flat.numel()} elements, expected {sum(widths)}")
                for name, shard in zip(group, flat.split(widths), strict=True):
                    shards.setdefault(name, []).append(shard)
        return [
            torch.cat(
                [
                    share(shards[name], math.prod(shape), rank, parameter_width(shape, world))
                    for name, shape in group.items()
                ]
            )
            for group in now
        ]

    return cut


def parameter_width(shape: Sequence[int], world: int) -> int:
    """Elements of a share of one parameter (ZeRO 3)."""
    return -(-math.prod(shape) // world)


def reshard(saved: Sequence[State], keys: StateKeys, cut: Cut, param_groups: Sequence[State]) -> State:
    """State of one rank from all ranks' that saved: flat tensors (`keys`) by `cut`, all else as rank 0's; the
    current groups number them. Raises ValueError if the shards do not add up to the whole."""
    adam = [state[keys.adam] for state in saved]
    weights = cut([state[keys.weights] for state in saved])
    states: dict[int, State] = {}
    if adam[0]["state"]:  # empty before the first update
        moments = {
            name: cut([[one["state"][number][name] for number in sorted(one["state"])] for one in adam])
            for name in _MOMENTS
        }
        # Fused Adam increments the step count in place: each flat tensor needs its own.
        step: torch.Tensor = adam[0]["state"][0]["step"]
        states = {
            number: {"step": step.clone()} | {name: flats[number] for name, flats in moments.items()}
            for number in range(len(weights))
        }
    groups = [
        group | {"params": current["params"]}
        for group, current in zip(adam[0]["param_groups"], param_groups, strict=True)
    ]
    return saved[0] | {keys.adam: {"state": states, "param_groups": groups}, keys.weights: weights}


def flattened(adam: State, weights: Mapping[str, torch.Tensor], shapes: Shapes) -> State:
    """What is resharded of a rank's state under ZeRO 1 or 2, from an Adam by parameter. Raises ValueError."""
    states: dict[int, State] = {}
    for index, (group, names) in enumerate(zip(adam["param_groups"], shapes, strict=True)):
        members: list[State] = [adam["state"].get(number, {}) for number in group["params"]]
        if any(members):  # empty before the first update
            step = next(member["step"] for member in members if member)
            states[index] = {"step": step} | {
                moment: torch.cat(
                    [
                        member[moment].flatten() if member else torch.zeros(math.prod(shape))
                        for member, shape in zip(members, names.values(), strict=True)
                    ]
                )
                for moment in _MOMENTS
            }
    groups = [group | {"params": [index]} for index, group in enumerate(adam["param_groups"])]
    flats = [torch.cat([weights[name].flatten().float() for name in names]) for names in shapes]
    return {ZERO_1_2.adam: {"state": states, "param_groups": groups}, ZERO_1_2.weights: flats}


def unflattened(adam: State, shapes: Shapes) -> State:
    """State of Adam for each parameter, from its state for the flat tensor of each group (without padding)."""
    states: dict[int, State] = {}
    number = 0
    for index, names in enumerate(shapes):
        sizes = [math.prod(shape) for shape in names.values()]
        flat = adam["state"].get(index)
        if flat:  # empty before the first update
            pieces = zip(names.values(), *(flat[moment].split(sizes) for moment in _MOMENTS), strict=True)
            for place, (shape, *moments) in enumerate(pieces, number):
                cut = {moment: piece.view(shape).clone() for moment, piece in zip(_MOMENTS, moments, strict=True)}
                states[place] = {"step": flat["step"].clone()} | cut
        number += len(names)
    return adam | {"state": states}


class ReshardingLoader:
    """Loads weights, optimizer and counters into a DeepSpeed engine, resharded for its group. Collective."""

    def __init__(self, engine: Any, stage: int, dtype: torch.dtype, *, whole: bool = True) -> None:
        """Set the engine to load into. `whole`: whether all weights were saved, not only the trained ones."""
        self._engine = engine
        self._stage = stage
        self._dtype = dtype
        self._whole = whole

    def load(self, folder: Path, ranks: int) -> None:
        """Load what a group of so many ranks wrote. Raises FileNotFoundError; ValueError if the contents do not fit."""
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
        whole, held = model["optimizer"] is not None, model["module"]
        if whole:
            before = [{name: tuple(held[name].shape) for name in group if name in held} for group in now]
        else:
            before = model["param_shapes"]
        if _all(before) != _all(now):
            raise ValueError(f"{of_model} has other parameters than the model")
        if whole:
            return [self._engine.optimizer.state_dict() | flattened(model["optimizer"], held, now)]
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
    """This rank's part of the moving average in all ranks' files; `average`: what it holds now, or none."""
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

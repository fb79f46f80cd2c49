"""Resharding of an optimizer's state: one rank's part, from what a group of another size saved.

ZeRO cuts a tensor into equal shares, one per rank, padded at the end. ZeRO 1 and 2 cut the concatenation of all
parameters of an optimizer group, ZeRO 3 each parameter. A rank keeps the concatenation of its shares of a group in flat
tensors: one of float32 weights and one of each moment of Adam. (See DeepSpeed's runtime/zero/stage_1_and_2.py and
stage3.py, and checkpoint/ds_to_universal.py, which reads them.) A single rank may have an Adam that is neither cut nor
flattened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
    """A rank's share of a tensor, as a copy.

    Args:
        shards: The tensor, cut into pieces in order.
        size: Elements of the tensor, without padding.
        rank: Number of the share.
        width: Elements of a share; zeros fill it up beyond the end of the tensor.

    Raises:
        ValueError: the shards have fewer than `size` elements.
    """
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
    """State of one rank from the states of all ranks that saved.

    Everything except the flat tensors is as rank 0 saved it.

    Args:
        saved: State of every rank that saved.
        keys: Keys of the resharded parts in the states.
        cut: Cuts this rank's part.
        param_groups: The optimizer's current groups, which number the flat tensors.

    Raises:
        ValueError: the shards do not add up to the whole.
    """
    adam = [state[keys.adam] for state in saved]
    weights = cut([state[keys.weights] for state in saved])
    states: dict[int, State] = {}
    if adam[0]["state"]:  # empty before the first update
        moments = {name: cut([_by_group(one["state"], name) for one in adam]) for name in _MOMENTS}
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
    """State that one rank saves under ZeRO 1 or 2, from an Adam with a state for each parameter.

    Only the parts that are resharded.

    Raises:
        ValueError: the number of parameters differs from `shapes`.
    """
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


def _by_group(state: Mapping[int, State], moment: str) -> list[torch.Tensor]:
    return [state[number][moment] for number in sorted(state)]

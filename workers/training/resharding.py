"""The state of an optimizer laid anew: what one rank of a group holds, from what a group of another size saved.

ZeRO cuts a whole in equal shares, one a rank, padded at the end: ZeRO 1 and 2 all parameters of an optimizer group end
to end, ZeRO 3 each parameter by itself. A rank keeps its shares of a group end to end in flat tensors: one of float32
weights and one of each moment of Adam. (DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py; its own
checkpoint/ds_to_universal.py reads them so.) One rank alone may have an Adam of which nothing is cut or flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

State = dict[str, Any]
"""What DeepSpeed saves of one rank's optimizer."""
Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""Whole shape of every parameter by name, group by group, in the order they are flattened in."""
Cut = Callable[[Sequence[Sequence[torch.Tensor]]], list[torch.Tensor]]
"""From every saved rank's flat tensors to this rank's, one a group."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateKeys:
    """Where an optimizer's state has what is laid anew."""

    adam: str
    weights: str


ZERO_1_2 = StateKeys("base_optimizer_state", "single_partition_of_fp32_groups")
ZERO_3 = StateKeys("optimizer_state_dict", "fp32_flat_groups")


def share(shards: Sequence[torch.Tensor], size: int, rank: int, width: int) -> torch.Tensor:
    """The `rank`-th `width` elements of the `size` that `shards` hold end to end; zeros behind the last. A copy.

    Raises ValueError where they hold fewer.
    """
    held = sum(shard.numel() for shard in shards)
    if held < size:
        raise ValueError(f"the shards of {size} elements hold {held}")
    first, end = min(rank * width, size), min((rank + 1) * width, size)
    pieces, start = [], 0
    for shard in shards:
        pieces.append(shard[max(first - start, 0) : max(end - start, 0)])
        start += shard.numel()
    return torch.cat([*pieces, shards[0].new_zeros(width - (end - first))])


def cut_groups(shapes: Shapes, widths: Sequence[int], rank: int) -> Cut:
    """ZeRO 1 and 2: a share of each group. `widths`: elements of a share now, by group."""

    def cut(saved: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        return [
            share([flats[number] for flats in saved], sum(map(math.prod, group.values())), rank, width)
            for number, (group, width) in enumerate(zip(shapes, widths, strict=True))
        ]

    return cut


def cut_parameters(before: Shapes, now: Shapes, rank: int, world: int) -> Cut:
    """ZeRO 3: a share of each parameter. The groups may differ: DeepSpeed makes more of them where shares are large."""

    def cut(saved: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        shards: dict[str, list[torch.Tensor]] = {}
        for flats in saved:
            for flat, group in zip(flats, before, strict=True):
                widths = [parameter_width(shape, len(saved)) for shape in group.values()]
                if flat.numel() != sum(widths):
                    raise ValueError(f"a flat tensor has {flat.numel()} elements, not {sum(widths)}")
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


def relaid(saved: Sequence[State], keys: StateKeys, cut: Cut, param_groups: Sequence[State]) -> State:
    """One rank's state from those of all ranks that saved; everything but flat tensors as rank 0 saved it.

    `param_groups`: the optimizer's as they are now, of which the numbers of the flat tensors are taken.
    Raises ValueError where the shards do not make up the whole.
    """
    adam = [state[keys.adam] for state in saved]
    weights = cut([state[keys.weights] for state in saved])
    states: dict[int, State] = {}
    if adam[0]["state"]:  # there is none before the first update
        moments = {name: cut([_by_group(one["state"], name) for one in adam]) for name in _MOMENTS}
        # Fused Adam counts in place: each flat tensor needs a count of its own.
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
    """What one rank saves under ZeRO 1 or 2, from an Adam with a state for each parameter.

    Only what is laid anew. Raises ValueError where there are not as many parameters as `shapes` has.
    """
    states: dict[int, State] = {}
    for index, (group, names) in enumerate(zip(adam["param_groups"], shapes, strict=True)):
        members: list[State] = [adam["state"].get(number, {}) for number in group["params"]]
        if any(members):  # there is none before the first update
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
    """An Adam's state for each parameter, from its state for the flat tensor of each group (without padding)."""
    states: dict[int, State] = {}
    number = 0
    for index, names in enumerate(shapes):
        sizes = [math.prod(shape) for shape in names.values()]
        flat = adam["state"].get(index)
        if flat:  # there is none before the first update
            pieces = zip(names.values(), *(flat[moment].split(sizes) for moment in _MOMENTS), strict=True)
            for place, (shape, *moments) in enumerate(pieces, number):
                cut = {moment: piece.view(shape).clone() for moment, piece in zip(_MOMENTS, moments, strict=True)}
                states[place] = {"step": flat["step"].clone()} | cut
        number += len(names)
    return adam | {"state": states}


def _by_group(state: Mapping[int, State], moment: str) -> list[torch.Tensor]:
    return [state[number][moment] for number in sorted(state)]

"""Resharding of an optimizer's state for another number of ranks, on handmade states."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from troupe.workers.training.resharding import (
    ZERO_1_2,
    ZERO_3,
    Shapes,
    State,
    cut_groups,
    cut_parameters,
    flattened,
    reshard,
    share,
    unflattened,
)

SHAPES: Shapes = ({"embed": (5, 3), "up": (4, 2)}, {"norm": (3,), "bias": (1,)})
SPLIT: Shapes = ({"embed": (5, 3)}, {"up": (4, 2)}, {"norm": (3,)}, {"bias": (1,)})
"""The same parameters in more groups, as ZeRO-3 splits them where shares are large."""
WORLDS = (1, 2, 3, 8)
STEP = 7.0


def wholes(kind: int) -> dict[str, torch.Tensor]:
    """Every parameter, of numbers that occur once; never zero, which is padding."""
    found, start = {}, 1000.0 * kind + 1
    for group in SHAPES:
        for name, shape in group.items():
            found[name] = torch.arange(start, start + math.prod(shape))
            start += math.prod(shape)
    return found


def shares(whole: torch.Tensor, world: int, align: int) -> list[torch.Tensor]:
    """The whole, padded to a multiple of `world` * `align`, in `world` equal parts."""
    padding = -whole.numel() % (world * align)
    return list(torch.cat([whole, whole.new_zeros(padding)]).chunk(world))


def flats(stage: int, shapes: Shapes, kind: int, world: int) -> list[list[torch.Tensor]]:
    """Flat tensors by rank and group."""
    parameters = wholes(kind)
    by_group = []
    for group in shapes:
        if stage == 3:
            cut = [shares(parameters[name], world, 1) for name in group]
            by_group.append([torch.cat(parts) for parts in zip(*cut, strict=True)])
        else:
            by_group.append(shares(torch.cat([parameters[name] for name in group]), world, 2))
    return [list(of_rank) for of_rank in zip(*by_group, strict=True)]


def states(stage: int, shapes: Shapes, world: int, *, updated: bool = True, lean: bool = False) -> list[State]:
    """State that each rank saves. `lean`: DeepSpeed removes the padding of the weights of ZeRO 1 and 2."""
    keys = ZERO_3 if stage == 3 else ZERO_1_2
    weights, first, second = (flats(stage, shapes, kind, world) for kind in range(3))
    found = []
    for rank in range(world):
        adam = {
            number: {"step": torch.tensor(STEP), "exp_avg": first[rank][number], "exp_avg_sq": second[rank][number]}
            for number in range(len(shapes))
        }
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": list(range(1, len(shapes)))}]
        kept = [flat[flat != 0] if lean else flat for flat in weights[rank]]
        found.append({keys.adam: {"state": adam if updated else {}, "param_groups": groups}, keys.weights: kept})
    return found


def same(one: State, other: State, stage: int) -> bool:
    keys = ZERO_3 if stage == 3 else ZERO_1_2
    found, expected = one[keys.adam]["state"], other[keys.adam]["state"]
    return (
        found.keys() == expected.keys()
        and all(torch.equal(found[n][key], expected[n][key]) for n in expected for key in expected[n])
        and all(torch.equal(a, b) for a, b in zip(one[keys.weights], other[keys.weights], strict=True))
    )


@pytest.mark.parametrize("before", WORLDS)
@pytest.mark.parametrize("now", WORLDS)
def test_a_resharded_rank_equals_one_of_the_new_size(before: int, now: int) -> None:
    for stage in (1, 3):
        keys = ZERO_3 if stage == 3 else ZERO_1_2
        expected = states(stage, SHAPES, now)
        for rank in range(now):
            widths = [flat.numel() for flat in expected[rank][keys.weights]]
            cut = cut_parameters(SHAPES, SHAPES, rank, now) if stage == 3 else cut_groups(SHAPES, widths, rank)
            saved = states(stage, SHAPES, before, lean=stage == 1)
            assert same(reshard(saved, keys, cut, expected[rank][keys.adam]["param_groups"]), expected[rank], stage)


@pytest.mark.parametrize(("before", "now"), [(SHAPES, SPLIT), (SPLIT, SHAPES)])
def test_zero_3_groups_may_differ(before: Shapes, now: Shapes) -> None:
    expected = states(3, now, 2)
    groups = expected[1][ZERO_3.adam]["param_groups"]
    found = reshard(states(3, before, 3), ZERO_3, cut_parameters(before, now, 1, 2), groups)
    assert same(found, expected[1], 3)
    assert found[ZERO_3.adam]["param_groups"] == groups


def uncut(updated: bool = True) -> tuple[State, dict[str, torch.Tensor]]:
    """An Adam with a state for each parameter, and the weights by name."""
    names = [name for group in SHAPES for name in group]
    shapes = {name: shape for group in SHAPES for name, shape in group.items()}
    weights, first, second = (
        {name: flat.view(shapes[name]) for name, flat in wholes(kind).items()} for kind in range(3)
    )
    state = {
        number: {"step": torch.tensor(STEP), "exp_avg": first[name], "exp_avg_sq": second[name]}
        for number, name in enumerate(names)
    }
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2, 3]}]
    return {"state": state if updated else {}, "param_groups": groups}, weights


@pytest.mark.parametrize("updated", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_unpartitioned_adam_and_ranks_load_each_others_state(world: int, updated: bool) -> None:
    adam, weights = uncut(updated)
    for rank, expected in enumerate(states(1, SHAPES, world, updated=updated)):
        widths = [flat.numel() for flat in expected[ZERO_1_2.weights]]
        groups = expected[ZERO_1_2.adam]["param_groups"]
        found = reshard([flattened(adam, weights, SHAPES)], ZERO_1_2, cut_groups(SHAPES, widths, rank), groups)
        assert same(found, expected, 1)
    saved = states(1, SHAPES, world, updated=updated, lean=True)
    together = reshard(saved, ZERO_1_2, cut_groups(SHAPES, [23, 4], 0), adam["param_groups"])
    found = unflattened(together[ZERO_1_2.adam], SHAPES)
    assert found["param_groups"] == adam["param_groups"] and found["state"].keys() == adam["state"].keys()
    for number, state in adam["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in state.items())
    storages = [value.data_ptr() for state in found["state"].values() for value in state.values()]
    assert len(set(storages)) == len(storages), "each has its own"


def test_a_parameter_that_was_never_trained_has_no_moments() -> None:
    adam, weights = uncut()
    del adam["state"][1]
    first = flattened(adam, weights, SHAPES)[ZERO_1_2.adam]["state"][0]
    assert float(first["step"]) == STEP
    assert torch.equal(first["exp_avg"], torch.cat([wholes(1)["embed"], torch.zeros(8)]))


def test_another_number_of_parameters_is_refused() -> None:
    adam, weights = uncut()
    adam["param_groups"][1]["params"].append(4)
    adam["state"][4] = adam["state"][3]
    with pytest.raises(ValueError, match="zip"):
        flattened(adam, weights, SHAPES)


def test_every_flat_tensor_counts_its_own_updates() -> None:
    groups = states(3, SHAPES, 1)[0][ZERO_3.adam]["param_groups"]
    found = reshard(states(3, SHAPES, 2), ZERO_3, cut_parameters(SHAPES, SHAPES, 0, 1), groups)
    steps = [state["step"] for state in found[ZERO_3.adam]["state"].values()]
    assert [float(step) for step in steps] == [STEP, STEP]
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairwise(steps))


def test_before_the_first_update_there_are_no_moments() -> None:
    groups = states(3, SHAPES, 1)[0][ZERO_3.adam]["param_groups"]
    saved = states(3, SHAPES, 2, updated=False)
    assert same(
        reshard(saved, ZERO_3, cut_parameters(SHAPES, SHAPES, 0, 1), groups),
        states(3, SHAPES, 1, updated=False)[0],
        3,
    )


def test_incomplete_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="the shards have 4 elements, expected at least 5"):
        share([torch.ones(2), torch.ones(2)], 5, 0, 3)
    saved = states(3, SHAPES, 2)
    groups = saved[0][ZERO_3.adam]["param_groups"]
    saved[1][ZERO_3.weights][0] = saved[1][ZERO_3.weights][0][:-1]
    with pytest.raises(ValueError, match="a flat tensor has 11 elements, expected 12"):
        reshard(saved, ZERO_3, cut_parameters(SHAPES, SHAPES, 0, 1), groups)
    saved = states(1, SHAPES, 2)
    with pytest.raises(ValueError, match="the shards have 12 elements, expected at least 23"):
        reshard(saved[:1], ZERO_1_2, cut_groups(SHAPES, [24, 4], 0), groups)

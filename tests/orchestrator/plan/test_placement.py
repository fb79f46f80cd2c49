"""Placement groups, colocation, packing and node labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.plan.placement import (
    ACCELERATOR,
    Node,
    RoleSize,
    demand,
    fit,
    impossible,
    place,
    place_one,
    role_sizes,
    room,
)
from troupe.orchestrator.plan.plan import plan
from troupe.orchestrator.spec.load import load_rollout_spec


def test_engines_are_placed_one_by_one_and_trainers_as_groups() -> None:
    """Engines can be added and removed without changing the trainer's placement group."""
    placements = place([RoleSize("rollout", 2, 1, 0, separate=True), RoleSize("policy", 3, 2, 1)])
    assert [(p.name, len(p.bundles)) for p in placements] == [("policy", 3), ("rollout-0", 1), ("rollout-1", 1)]
    assert demand(placements) == {"CPU": 8, "GPU": 3}


def test_colocated_roles_share_bundles_worker_by_worker() -> None:
    """One engine per policy GPU. A reference inside the policy processes has no placement."""
    (policy,) = place(
        [
            RoleSize("policy", 2, 1, 0.5),
            RoleSize("rollout", 2, 1, 0.5, colocate_with="policy"),
            RoleSize("reference", 1, 1, 0, colocate_with="policy", in_process=True),
        ]
    )
    assert policy.bundles == ({"CPU": 2, "GPU": 1.0}, {"CPU": 2, "GPU": 1.0})
    assert [(s.role, s.index, s.bundle) for s in policy.workers] == [
        ("policy", 0, 0),
        ("policy", 1, 1),
        ("rollout", 0, 0),
        ("rollout", 1, 1),
    ]


def test_an_engine_of_several_gpus_shares_a_bundle_with_the_ranks_that_have_them() -> None:
    """Ray reserves the GPUs once, for the ranks; a bundle is on one node, as an engine is."""
    (policy,) = place([RoleSize("policy", 4, 1, 1), RoleSize("rollout", 2, 1, 2, colocate_with="policy", ranks=2)])
    assert policy.bundles == ({"CPU": 3, "GPU": 2}, {"CPU": 3, "GPU": 2})
    assert [(s.role, s.index, s.bundle, s.borrows) for s in policy.workers] == [
        *(("policy", rank, rank // 2, False) for rank in range(4)),
        *(("rollout", engine, engine, True) for engine in range(2)),
    ]


def test_the_first_placement_that_does_not_fit_is_named() -> None:
    """Three engines of two GPUs each, on two nodes of two GPUs each."""
    placements = place([RoleSize("rollout", 3, 1, 2, separate=True)])
    result = fit(placements, [Node("a", 8, 2), Node("b", 8, 2)])
    assert result.missing is not None
    assert result.missing.name == "rollout-2"
    assert result.node_of == {("rollout-0", 0): "a", ("rollout-1", 0): "b"}


def test_an_added_worker_is_placed_like_the_existing_ones() -> None:
    role = RoleSize("rollout", 2, 1.5, 1, separate=True)
    assert place_one(role, 1) == place([role])[1]
    assert place_one(role, 7) == place([replace(role, workers=8)])[7]


def test_room_counts_roles_at_their_max_workers() -> None:
    sets = ("roles.rollout.max_workers=4", "roles.reward.max_workers=3")
    spec = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml", sets)
    assert room(spec) == {"CPU": 4 * 0.5 + 0.5 + 3 * 0.25, "GPU": 0}


def test_a_role_is_placed_only_on_nodes_with_its_labels() -> None:
    sets = ("roles.rollout.node_labels={part: engine}", "roles.policy.accelerator=H200", "roles.policy.strategy=spread")
    placements = place(role_sizes(load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml", sets)))
    requested = {p.name: (p.strategy, dict(p.labels)) for p in placements}
    assert requested == {
        "policy": ("SPREAD", {ACCELERATOR: "H200"}),
        "reward-0": ("PACK", {}),
        "rollout-0": ("PACK", {"part": "engine"}),
    }
    engines, trainers = (
        Node("engines", 8, 0, labels={"part": "engine"}),
        Node("trainers", 8, 0, labels={ACCELERATOR: "H200"}),
    )
    assert fit(placements, [engines, trainers]).node_of == {
        ("policy", 0): "trainers",
        ("reward-0", 0): "engines",
        ("rollout-0", 0): "engines",
    }
    missing = fit(placements, [engines]).missing
    assert missing is not None and missing.name == "policy"


def test_unknown_labels_of_a_described_node_do_not_exclude_a_role() -> None:
    placements = place([RoleSize("policy", 1, 1, 1, labels=(("zone", "a"), (ACCELERATOR, "H200")))])
    assert fit(placements, [Node("node-0", 8, 8, accelerator="H200")]).missing is None
    assert fit(placements, [Node("node-0", 8, 8)]).missing is None
    assert fit(placements, [Node("node-0", 8, 8, accelerator="H100")]).missing is not None


@pytest.mark.parametrize("role", ["rollout", "reward", "policy"])
def test_a_spread_role_has_its_workers_on_different_nodes(role: str) -> None:
    sets = [f"roles.{role}.workers=4", f"roles.{role}.cpus=1"]
    nodes = [Node(name, 8, 0) for name in ("a", "b", "c")]

    def places(*more: str) -> list[str]:
        planned = plan(load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml", [*sets, *more]), nodes)
        return [row.node for row in planned.rows if row.worker.startswith(role)]

    assert places() == ["a"] * 4
    assert places(f"roles.{role}.strategy=spread") == ["a", "b", "c", "a"]


def test_spread_workers_share_a_node_when_no_other_has_room() -> None:
    wide = RoleSize("rollout", 3, 2, 0, strategy="SPREAD", separate=True)
    result = fit(place([wide]), [Node("small", 1, 0), Node("large", 6, 0)])
    assert result.missing is None and set(result.node_of.values()) == {"large"}


def test_an_added_worker_of_a_spread_role_goes_to_the_node_with_the_fewest() -> None:
    role = RoleSize("rollout", 1, 1, 0, strategy="SPREAD", separate=True)
    nodes = [Node("a", 4, 0), Node("b", 4, 0), Node("full", 0, 0)]
    existing = Counter({("rollout", "a"): 2, ("rollout", "b"): 1, ("reward", "b"): 3})
    assert fit([place_one(role, 3)], nodes, existing).node_of == {("rollout-3", 0): "b"}


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ([RoleSize("policy", 1, 4, 0), RoleSize("rollout", 2, 2, 0, separate=True)], ""),
        (
            [RoleSize("policy", 2, 5, 0)],
            "no node is large enough for policy: a worker needs 5 CPU 0 GPU on one node, "
            "and the largest has 4 CPU 0 GPU",
        ),
        (
            [RoleSize("policy", 1, 4, 0, labels=(("part", "keep"),)), RoleSize("reward", 3, 1.5, 0)],
            "the workers need 8.5 CPU 0 GPU in all on nodes, and these have 8 CPU 0 GPU",
        ),
        (
            [RoleSize("policy", 2, 3, 0, labels=(("part", "keep"),))],
            "the workers need 6 CPU 0 GPU in all on nodes with part=keep, and these have 4 CPU 0 GPU",
        ),
        (
            [RoleSize("policy", 1, 1, 0, labels=(("part", "spot"),))],
            "the workers need 1 CPU 0 GPU in all on nodes with part=spot, and these have 0 CPU 0 GPU",
        ),
        ([RoleSize("reward", 80, 0.1, 0, separate=True)], ""),
    ],
)
def test_what_no_division_of_the_nodes_can_hold_is_known(roles: list[RoleSize], problem: str) -> None:
    nodes = [Node("a", 4, 0, labels={"part": "keep"}), Node("b", 4, 0, labels={})]
    assert impossible(place(roles), nodes) == problem

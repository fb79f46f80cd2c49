"""Placement: groups, colocation, packing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.placement import ACCELERATOR, Node, RoleSize, demand, fit, place, place_one, role_sizes, room
from orchestrator.plan import plan
from orchestrator.spec import load_spec
from tests.conftest import ROOT


def test_engines_are_placed_one_by_one_and_trainers_as_gangs() -> None:
    """Engines come and go without touching the trainer's reservation."""
    placements = place([RoleSize("rollout", 2, 1, 0, separate=True), RoleSize("policy", 3, 2, 1)])
    assert [(p.name, len(p.bundles)) for p in placements] == [("policy", 3), ("rollout-0", 1), ("rollout-1", 1)]
    assert demand(placements) == {"CPU": 8, "GPU": 3}


def test_colocated_roles_share_bundles_worker_by_worker() -> None:
    """An engine on each policy GPU; the reference inside the policy's processes takes no seat."""
    (policy,) = place(
        [
            RoleSize("policy", 2, 1, 0.5),
            RoleSize("rollout", 2, 1, 0.5, colocate_with="policy"),
            RoleSize("reference", 1, 1, 0, colocate_with="policy", in_process=True),
        ]
    )
    assert policy.bundles == ({"CPU": 2, "GPU": 1.0}, {"CPU": 2, "GPU": 1.0})
    assert [(s.role, s.index, s.bundle) for s in policy.seats] == [
        ("policy", 0, 0),
        ("policy", 1, 1),
        ("rollout", 0, 0),
        ("rollout", 1, 1),
    ]


def test_first_misfit_is_named() -> None:
    """Three engines of two GPUs on two nodes of two."""
    placements = place([RoleSize("rollout", 3, 1, 2, separate=True)])
    seating = fit(placements, [Node("a", 8, 2), Node("b", 8, 2)])
    assert seating.missing is not None
    assert seating.missing.name == "rollout-2"
    assert seating.node_of == {("rollout-0", 0): "a", ("rollout-1", 0): "b"}


def test_one_more_worker_sits_as_those_before_it() -> None:
    role = RoleSize("rollout", 2, 1.5, 1, separate=True)
    assert place_one(role, 1) == place([role])[1]
    assert place_one(role, 7) == place([replace(role, workers=8)])[7]


def test_room_is_for_the_most_workers_there_may_be() -> None:
    sets = ("roles.rollout.max_workers=4", "roles.reward.max_workers=3")
    spec = load_spec(ROOT / "deploy" / "tiny-grpo.yaml", sets)
    assert room(spec) == {"CPU": 4 * 0.5 + 0.5 + 3 * 0.25, "GPU": 0}


def test_a_role_sits_only_where_its_labels_are() -> None:
    sets = ("roles.rollout.node_labels={part: engine}", "roles.policy.accelerator=H200", "roles.policy.strategy=spread")
    placements = place(role_sizes(load_spec(ROOT / "deploy" / "tiny-grpo.yaml", sets)))
    asked = {p.name: (p.strategy, dict(p.labels)) for p in placements}
    assert asked == {
        "policy": ("SPREAD", {ACCELERATOR: "H200"}),
        "reward-0": ("PACK", {}),
        "rollout-0": ("PACK", {"part": "engine"}),
    }
    here, there = Node("here", 8, 0, labels={"part": "engine"}), Node("there", 8, 0, labels={ACCELERATOR: "H200"})
    assert fit(placements, [here, there]).node_of == {
        ("policy", 0): "there",
        ("reward-0", 0): "here",
        ("rollout-0", 0): "here",
    }
    missing = fit(placements, [here]).missing
    assert missing is not None and missing.name == "policy"


def test_what_is_not_known_of_a_described_node_does_not_keep_a_role_away() -> None:
    placements = place([RoleSize("policy", 1, 1, 1, labels=(("zone", "a"), (ACCELERATOR, "H200")))])
    assert fit(placements, [Node("node-0", 8, 8, accelerator="H200")]).missing is None
    assert fit(placements, [Node("node-0", 8, 8)]).missing is None
    assert fit(placements, [Node("node-0", 8, 8, accelerator="H100")]).missing is not None


@pytest.mark.parametrize("role", ["rollout", "reward", "policy"])
def test_the_plan_of_a_role_that_is_spread_puts_its_workers_on_different_nodes(role: str) -> None:
    sets = [f"roles.{role}.workers=4", f"roles.{role}.cpus=1"]
    nodes = [Node(name, 8, 0) for name in ("a", "b", "c")]

    def seats(*more: str) -> list[str]:
        planned = plan(load_spec(ROOT / "deploy" / "tiny-grpo.yaml", [*sets, *more]), nodes)
        return [row.node for row in planned.rows if row.worker.startswith(role)]

    assert seats() == ["a"] * 4
    assert seats(f"roles.{role}.strategy=spread") == ["a", "b", "c", "a"]


def test_where_only_one_node_has_room_all_that_are_spread_go_there() -> None:
    wide = RoleSize("rollout", 3, 2, 0, strategy="SPREAD", separate=True)
    seating = fit(place([wide]), [Node("small", 1, 0), Node("large", 6, 0)])
    assert seating.missing is None and set(seating.node_of.values()) == {"large"}


def test_one_more_worker_of_a_role_that_is_spread_goes_where_fewest_are() -> None:
    role = RoleSize("rollout", 1, 1, 0, strategy="SPREAD", separate=True)
    nodes = [Node("a", 4, 0), Node("b", 4, 0), Node("full", 0, 0)]
    sitting = Counter({("rollout", "a"): 2, ("rollout", "b"): 1, ("reward", "b"): 3})
    assert fit([place_one(role, 3)], nodes, sitting).node_of == {("rollout-3", 0): "b"}

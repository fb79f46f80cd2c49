"""Worker pods: whole nodes for gangs, and every bundle in a pod."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.orchestrator.platforms.kubernetes.manifests import NODE, PPO, SPECS, runs
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import Node, fit, place, role_sizes
from troupe.orchestrator.platforms.kubernetes.pods import Limits, PodGroup, pack, pod_groups, shares

CHAIN = SPECS / "tiny-three-stage.yaml"


def sizes(groups: Sequence[PodGroup]) -> dict[str, tuple[int, int, int]]:
    """(pods, CPUs, GPUs) by group."""
    return {group.name: (group.replicas, group.cpus, group.gpus) for group in groups}


def pod_nodes(groups: Sequence[PodGroup]) -> list[Node]:
    """The worker pods as nodes for `placement.fit`, smallest first, so that no bundle takes a larger pod than it
    needs."""
    ordered = sorted(groups, key=lambda group: (group.gpus, group.cpus))
    return [Node(f"{g.name}-{i}", g.cpus, g.gpus) for g in ordered for i in range(g.replicas)]


def test_a_run_of_eight_gpus_is_one_pod_and_its_rewards_are_another() -> None:
    assert sizes(pod_groups(runs(NODE), Limits())) == {"gpu": (1, 4 * 8 + 4 * 4, 8), "cpu": (1, 8, 0)}


def test_the_ranks_of_a_trainer_share_pods_of_whole_nodes() -> None:
    (of_run,) = shares(runs(PPO), Limits())
    (share,) = of_run
    assert (share.packing.pods, share.packing.gpus) == (4, 8)
    for trainer, ranks in (("policy", 8), ("critic", 4)):
        assert len({share.packing.pod_of[trainer, rank] for rank in range(ranks)}) == 1


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(8, (4, 64, 8)), (4, (8, 32, 4)), (2, (16, 16, 2)), (1, (16, 16, 2)), (16, (2, 104, 16)), (100, (1, 144, 32))],
)
def test_the_number_of_gpus_per_pod_can_be_set(limit: int, expected: tuple[int, int, int]) -> None:
    """Engines of two GPUs do not fit into pods of one."""
    pods, cpus, gpus = sizes(pod_groups(runs(PPO), Limits(gpus=limit)))["gpu"]
    assert (pods, gpus) == (expected[0], expected[2])
    assert cpus == expected[1]


def test_pods_are_no_larger_than_needed_and_alike() -> None:
    twelve = runs(NODE, "roles.rollout.workers=8")
    assert sizes(pod_groups(twelve, Limits()))["gpu"][::2] == (2, 6)
    three = runs(NODE, "roles.rollout.workers=1", "roles.policy.workers=2")
    assert sizes(pod_groups(three, Limits()))["gpu"][::2] == (1, 3)
    eleven = runs(NODE, "roles.rollout.workers=7")
    assert sizes(pod_groups(eleven, Limits()))["gpu"][::2] == (2, 6)


def test_the_ranks_of_a_trainer_are_not_split_to_save_gpus() -> None:
    """Four engines and eight ranks would fit into two pods of six."""
    (of_run,) = shares(runs(NODE, "roles.policy.workers=8"), Limits())
    packing = next(share.packing for share in of_run if share.group == "gpu")
    assert (packing.pods, packing.gpus) == (2, 8)
    assert len({packing.pod_of["policy", rank] for rank in range(8)}) == 1
    twelve = shares(runs(NODE, "roles.policy.workers=12"), Limits())[0][0].packing
    assert len({twelve.pod_of["policy", rank] for rank in range(12)}) == 2


def test_workers_without_gpus_share_pods_of_their_own() -> None:
    forty = runs(NODE, "roles.reward.workers=40")
    assert sizes(pod_groups(forty, Limits()))["cpu"] == (3, 14, 0)
    assert sizes(pod_groups(forty, Limits(cpus=64)))["cpu"] == (1, 40, 0)
    large = runs(NODE, "roles.reward.cpus=20", "roles.reward.workers=2")
    assert sizes(pod_groups(large, Limits()))["cpu"] == (2, 20, 0)


def test_a_role_that_scales_has_pods_of_its_own_one_worker_each() -> None:
    groups = pod_groups(runs(NODE, "roles.rollout.min_workers=2", "roles.rollout.max_workers=6"), Limits())
    rollout = next(group for group in groups if group.name == "rollout")
    assert rollout == PodGroup("rollout", 4, 2, 6, 4, 1)
    assert sizes(groups)["gpu"] == (1, 32, 4)


def test_roles_with_other_labels_have_pods_of_their_own() -> None:
    groups = pod_groups(runs(NODE, "roles.rollout.node_labels={zone: a}"), Limits())
    assert {group.name: group.labels for group in groups} == {"gpu": (), "gpu-2": (("zone", "a"),), "cpu": ()}


def test_the_groups_of_a_chain_are_the_same_in_every_stage() -> None:
    """A stage without a policy's label must not take the pods of another label."""
    stages = runs(CHAIN, "stages.ppo.roles.policy.node_labels={zone: a}")
    names = {share.group: share.packing.placements[0].labels for of_run in shares(stages, Limits()) for share in of_run}
    assert names["cpu"] == () and names["cpu-2"] == (("zone", "a"),)


def test_colocated_roles_share_the_gpus_of_a_pod() -> None:
    shared = ["roles.rollout.colocate_with=policy", "roles.rollout.gpus=0.5", "roles.policy.gpus=0.5"]
    shared += ["schedule.max_staleness=0", "weight_sync.backend=ipc"]
    assert sizes(pod_groups(runs(NODE, *shared), Limits())) == {"gpu": (1, 48, 4), "cpu": (1, 8, 0)}


@pytest.mark.parametrize(("share", "workers", "gpus"), [(0.3, 7, 3), (0.4, 5, 3), (0.5, 4, 2), (1 / 7, 7, 1)])
def test_no_worker_lies_across_two_gpus(share: float, workers: int, gpus: int) -> None:
    """Of 0.4 GPU, two fit on one: five need three GPUs, not two."""
    judge = ["roles.reward.model={path: /models/judge}", "roles.reward.micro_batch_tokens=8192"]
    sets = [f"roles.reward.gpus={share}", f"roles.reward.workers={workers}", *judge]
    specs = runs(NODE, *sets, "roles.policy.workers=1", "roles.rollout.workers=1")
    reward = [placement for placement in place(role_sizes(specs[0])) if placement.role == "reward"]
    assert pack(reward, Limits()).gpus == gpus


def test_the_pods_of_a_chain_fit_its_largest_stage() -> None:
    stages = runs(CHAIN, "stages.sft.roles.policy.workers=3", "stages.ppo.roles.policy.cpus=2.5")
    groups = pod_groups(stages, Limits())
    for stage in stages:
        assert fit(place(role_sizes(stage)), pod_nodes(groups)).missing is None


def test_bundles_with_gpus_are_placed_first() -> None:
    """Otherwise a reward worker of one core could take the core beside the last GPU."""
    order = [sum(bundle["GPU"] for bundle in p.bundles) > 0 for p in place(role_sizes(runs(NODE)[0]))]
    assert order == sorted(order, reverse=True)


def test_a_large_cluster_is_packed_without_waste() -> None:
    more = ["roles.policy.workers=512", "roles.rollout.workers=512", "roles.critic.workers=128"]
    specs = runs(PPO, *more, "schedule.prompts_per_step=2048")
    total = 512 + 1024 + 128 + 2 + 2
    pods, _, gpus = sizes(pod_groups(specs, Limits()))["gpu"]
    assert gpus == 8 and pods <= math.ceil(total / 8) + 1


def test_the_replicas_of_a_group_lie_within_its_limits() -> None:
    with pytest.raises(UsageError, match="policy: expected between 3 and 4 pods, got 2"):
        PodGroup("policy", 2, 3, 4, 1, 0)


def test_the_pods_of_a_named_environment_have_a_name_without_a_dot() -> None:
    """Each environment that scales has pods of its own; a group's name is part of names of hosts."""
    groups = pod_groups(runs(SPECS / "tiny-mixture.yaml", "roles.environment.guess.max_workers=3"), Limits())
    assert sizes(groups)["environment-guess"] == (1, 1, 0)
    assert {group.name for group in groups} == {"cpu", "environment-guess"}

"""What `colocate_with: policy` implies where the spec says nothing else, and that it fits where something does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.orchestrator.plan.test_remedies import SEVEN_B
from troupe.orchestrator.plan.memory import Sizes, shared_engines
from troupe.orchestrator.plan.placement import Node, place, role_sizes
from troupe.orchestrator.plan.plan import Plan, described_nodes, plan
from troupe.orchestrator.roles.settings import rollout_config
from troupe.orchestrator.roles.table import settings_of
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.units import GIB

SPEC = """\
name: shared
model: {path: given}
roles:
  rollout: {colocate_with: policy}
  policy: {}
  reward: {functions: [{name: exact_match}]}
algorithm: {name: grpo}
schedule: {steps: 5, prompts_per_step: 8}
data: {train: {kind: jsonl, path: train.jsonl}}
"""


def load(folder: Path, *overrides: str) -> RolloutSpec:
    path = folder / "spec.yaml"
    path.write_text(SPEC)
    return load_rollout_spec(path, overrides)


def planned(spec: RolloutSpec, cluster: str) -> Plan:
    return plan(spec, described_nodes(cluster, 128), Sizes({"given": SEVEN_B}), advise=True)


@pytest.mark.parametrize(
    ("overrides", "workers", "rollout", "policy"),
    [
        ((), 1, 0.5, 0.5),
        (("roles.policy.workers=4",), 4, 0.5, 0.5),
        (("roles.policy.gpus=1", "roles.rollout.gpus=1"), 1, 0.5, 0.5),
        (("roles.policy.gpus=0.7",), 1, 0.3, 0.7),
        (("roles.rollout.gpus=0.2", "roles.policy.gpus=1"), 1, 0.2, 0.8),
        (("roles.rollout.gpus=0.2", "roles.policy.gpus=0.3"), 1, 0.2, 0.3),
    ],
)
def test_workers_and_gpus_that_are_left_open_are_those_of_the_gpu_they_share(
    overrides: tuple[str, ...], workers: int, rollout: float, policy: float, tmp_path: Path
) -> None:
    spec = load(tmp_path, *overrides)
    roles = spec.roles
    assert (roles.rollout.workers, roles.policy.workers) == (workers, workers)
    assert (roles.rollout.gpus, roles.policy.gpus) == (rollout, policy)
    assert (spec.device, resolved_backend(spec), roles.rollout.resolved_sleep) == ("cuda", "ipc", "kv_cache")
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert load_rollout_spec(tmp_path / "resolved.yaml") == spec


@pytest.mark.parametrize("more", [(), ("roles.rollout.workers=2", "roles.rollout.gpus=4", "roles.policy.gpus=1")])
def test_an_engine_over_several_gpus_shares_those_of_as_many_policy_workers(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """Of each GPU the plan counts one rank and the engine's part there, and vLLM is told the cache of one GPU."""
    given = ("roles.rollout.tensor_parallel_size=4", "roles.policy.workers=8", "roles.policy.zero_stage=3")
    spec = load(tmp_path, *given, *more)
    assert (spec.roles.rollout.workers, spec.roles.rollout.gpus, spec.roles.policy.gpus) == (2, 4, 1)
    assert (resolved_backend(spec), spec.roles.rollout.resolved_sleep) == ("ipc", "kv_cache")
    found = plan(spec, described_nodes("1x8xH100", 128), Sizes({"given": SEVEN_B}))
    assert found.misfit == "" and found.asked["GPU"] == 8
    pairs = [(f"policy-{rank}", f"rollout-{rank // 4}") for rank in range(8)]
    assert [use.workers for use in found.memory.shared] == pairs
    of_one = load(tmp_path, *given[1:])
    alone = plan(of_one, described_nodes("1x8xH100", 128), Sizes({"given": SEVEN_B}))
    weights, quarter = (
        {p.name: p.bytes for m in one.memory.workers if (m.worker, m.where) == ("rollout-0", "gpu") for p in m.parts}[
            "weights"
        ]
        for one in (alone, found)
    )
    assert quarter == -(-weights // 4)
    cache = shared_engines(spec, int(79.6 * GIB), Sizes({"given": SEVEN_B}))["rollout"]
    assert cache[0] == found.memory.caches["rollout-0"].bytes // 4
    split = plan(spec, described_nodes("4x2xH100", 128), Sizes({"given": SEVEN_B}), advise=True)
    assert split.misfit.startswith("no node is large enough for policy: a worker needs 5 CPU 4 GPU on one node")
    assert {"roles.rollout.tensor_parallel_size": 2, "roles.rollout.workers": 4, "roles.rollout.gpus": 2} in [
        dict(remedy.changes) for remedy in split.remedies
    ]


def test_an_engine_without_room_beside_its_rank_is_divided_over_more_of_the_policys_gpus(tmp_path: Path) -> None:
    size = replace(SEVEN_B, backbone=5 * SEVEN_B.backbone, layers=5 * SEVEN_B.layers)
    given = ("roles.policy.workers=16", "roles.policy.zero_stage=3", "roles.policy.gradient_checkpointing=true")
    spec = load(tmp_path, *given)
    found = plan(spec, described_nodes("2x8xH100", 128), Sizes({"given": size}), advise=True)
    assert found.misfit.startswith("policy-0 and rollout-0 need 117.6 GiB of a GPU's 79.6 during updates: ")
    wider = [dict(remedy.changes) for remedy in found.remedies if remedy.then is None]
    assert {
        "roles.rollout.tensor_parallel_size": 4,
        "roles.rollout.workers": 4,
        "roles.rollout.gpus": 4,
        "roles.policy.gpus": 1,
    } in wider


OFFLOADED = (
    *("roles.policy.zero_stage=3", "roles.policy.offload_optimizer=true"),
    *("roles.policy.gradient_checkpointing=true", "roles.policy.micro_batch_tokens=1024"),
)


@pytest.mark.parametrize(
    ("gib", "gpus", "overrides", "spare"),
    [
        (79.6, 8, ("roles.policy.workers=8", "roles.policy.zero_stage=3"), True),
        (140.4, 1, ("roles.policy.offload_optimizer=true",), True),
        (79.6, 1, OFFLOADED[:2], True),
        (40.0, 1, OFFLOADED, True),
        (37.5, 1, (*OFFLOADED, "roles.rollout.sleep=weights"), False),
    ],
)
def test_an_engine_takes_what_the_policy_leaves_it(
    gib: float, gpus: int, overrides: tuple[str, ...], spare: bool, tmp_path: Path
) -> None:
    """7B: a tenth of each GPU stays free while engines sample, or all is taken where the cache holds no sequence."""
    node = Node("node", 128.0, float(gpus), 0, int(gib * GIB))
    found = plan(load(tmp_path, *overrides), [node], Sizes({"given": SEVEN_B}))
    assert found.misfit == ""
    assert len(found.memory.shared) == gpus
    for use in found.memory.shared:
        free = (use.capacity - use.periods["sampling"]) / use.capacity
        assert (0.1 <= free < 0.13) if spare else (0 <= free < 0.1)
    assert all(cache.sequences for cache in found.memory.caches.values())


def test_an_engine_that_never_rests_leaves_room_for_the_updates(tmp_path: Path) -> None:
    spec = load(tmp_path, "roles.rollout.sleep=none", "roles.policy.workers=8", "roles.policy.zero_stage=3")
    found = planned(spec, "1x8xH100")
    assert found.misfit == "" and found.memory.warnings == ()


def test_what_does_not_fit_in_any_share_says_what_to_change(tmp_path: Path) -> None:
    found = planned(load(tmp_path), "1x1xH100")
    assert "during updates" in found.misfit
    assert found.remedies and all("roles.rollout.gpu_memory_utilization" not in r.changes for r in found.remedies)


def test_a_share_that_is_written_is_kept(tmp_path: Path) -> None:
    given = load(tmp_path, "roles.rollout.gpu_memory_utilization=0.3")
    assert rollout_config(given).engine.gpu_memory_utilization == 0.3
    assert shared_engines(given, 80 * GIB, Sizes({"given": SEVEN_B}))["rollout"][1] == 0.3
    assert rollout_config(load(tmp_path)).engine.gpu_share == 0.5, "where the memory of the GPU is not known"


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (("roles.rollout.gpus=0.5", "roles.policy.gpus=0.5"), True),
        (("roles.rollout.gpus=0.4", "roles.policy.gpus=1", "roles.rollout.workers=2"), True),
        (("roles.rollout.gpus=0.4", "roles.policy.gpus=1", "roles.rollout.max_workers=2"), True),
        (("roles.rollout.gpus=0.4", "roles.policy.gpus=1"), False),
        (("roles.rollout.gpus=0.6", "roles.policy.gpus=0.5", "roles.rollout.workers=2"), False),
        (("roles.rollout.gpus=0.5", "roles.policy.gpus=0.5", "weight_sync.backend=shm"), False),
        (("roles.rollout.gpus=0.5", "roles.policy.gpus=0.5", "roles.rollout.colocate_with=policy"), False),
    ],
)
def test_two_processes_of_a_transfer_group_are_never_on_one_gpu(
    overrides: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    """NCCL refuses that, and Ray puts fractions on one GPU where they fit."""
    apart = ("roles.rollout.colocate_with=null", *overrides)
    if not refused:
        load(tmp_path, *apart)
        return
    remedy = "set roles.rollout.colocate_with: policy, or weight_sync.backend: shm"
    with pytest.raises(SpecError, match=rf"roles\.rollout\.gpus: with 0\.[45], two processes may .*{remedy}"):
        load(tmp_path, *apart)


TAUGHT = (
    "algorithm={name: gkd}",
    "roles.teacher={big: {kind: engine, colocate_with: policy, model: {path: big}, max_model_len: 2049, "
    "gpu_memory_utilization: 0.3}}",
)


@pytest.mark.parametrize(
    ("overrides", "workers", "parts"),
    [
        ((), 1, (0.3334, 0.3333, 0.3333)),
        (("roles.policy.workers=4",), 4, (0.3334, 0.3333, 0.3333)),
        (("roles.policy.gpus=0.5",), 1, (0.5, 0.25, 0.25)),
        (("roles.rollout.gpus=0.3", "roles.policy.gpus=1"), 1, (0.35, 0.3, 0.35)),
        (("roles.rollout.gpus=0.3", "roles.policy.gpus=0.6"), 1, (0.6, 0.3, 0.1)),
        (("roles.rollout={gpus: 1}",), 1, (0.5, 1.0, 0.5)),
    ],
)
def test_a_teacher_shares_the_gpu_too(
    overrides: tuple[str, ...], workers: int, parts: tuple[float, float, float], tmp_path: Path
) -> None:
    spec = load(tmp_path, *TAUGHT, *overrides)
    teacher = spec.roles.teachers()["teacher.big"]
    assert (spec.roles.policy.gpus, spec.roles.rollout.gpus, teacher.gpus) == parts
    assert teacher.workers == spec.roles.policy.workers == workers
    guests = ("rollout", "teacher.big") if spec.roles.rollout.colocate_with else ("teacher.big",)
    assert spec.roles.sleepers() == guests == tuple(spec.roles.guests())
    assert settings_of(spec, "teacher.big").config.sleep == "kv_cache"
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert load_rollout_spec(tmp_path / "resolved.yaml") == spec
    whole = [placed.bundles for placed in place(role_sizes(spec)) if placed.role == "policy"]
    assert [bundle["GPU"] for (bundles,) in zip(whole, strict=True) for bundle in bundles] == workers * [1.0]


def test_engines_of_several_gpus_share_those_of_the_same_policy_workers(tmp_path: Path) -> None:
    wide = (
        "roles.policy.workers=4",
        "roles.rollout.tensor_parallel_size=2",
        "roles.teacher.big.tensor_parallel_size=2",
    )
    spec = load(tmp_path, *TAUGHT, *wide)
    assert {(one.workers, one.gpus) for one in spec.roles.guests().values()} == {(2, 2)}
    sizes = Sizes({"given": SEVEN_B, "big": SEVEN_B})
    found = plan(spec, described_nodes("1x4xH200", 128), sizes)
    assert [use.workers for use in found.memory.shared] == [
        (f"policy-{rank}", f"rollout-{rank // 2}", f"teacher.big-{rank // 2}") for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ("schedule.max_staleness=1",),
            "schedule.max_staleness: must be 0 where rollout shares the policy's GPUs: engines sleep during updates",
        ),
        (
            ("roles.rollout={gpus: 1}", "schedule.max_staleness=1"),
            "schedule.max_staleness: must be 0 where teacher.big shares the policy's GPUs",
        ),
        (
            ("roles.teacher.big.gpu_memory_utilization=null",),
            "roles.teacher.big.gpu_memory_utilization: is required on the policy's GPUs",
        ),
        (
            ("roles.policy.workers=2", "roles.policy.gpus=1", "roles.teacher.big.tensor_parallel_size=2"),
            "roles.teacher.big.tensor_parallel_size: must be 1, as in roles.rollout, whose engines are on the same",
        ),
        (
            ("roles.teacher.big.workers=2",),
            "roles.teacher.big.colocate_with: needs one engine for each policy worker, got 2 and 1",
        ),
        (
            ("roles.rollout.gpus=0.5", "roles.policy.gpus=0.4", "roles.teacher.big.gpus=0.2"),
            "roles.rollout.colocate_with: they share one GPU, but ask for 0.2 + 0.5 + 0.4 of it; remove all:",
        ),
        (
            ("roles.policy.gpus=0", "roles.rollout={}"),
            "roles.teacher.big.colocate_with: teacher.big and policy can share GPUs only",
        ),
        (
            ("roles.teacher.big.colocate_with=null", "roles.teacher.big.sleep=weights", "roles.teacher.big.gpus=1"),
            "roles.teacher.big.sleep: nobody takes the memory of an engine that sleeps on separate GPUs; remove it or "
            "set roles.teacher.big.colocate_with: policy",
        ),
        (
            ("roles.teacher.big.colocate_with=null", "roles.teacher.big.sleep=weights"),
            "roles.teacher.big.sleep: weights needs a GPU: vLLM's CPU build releases no memory",
        ),
        (
            ("roles.teacher.big.max_workers=2",),
            "roles.teacher.big.max_workers: has no effect: there is one engine for each policy worker",
        ),
        (
            ("roles.teacher.big.prompt='{prompt} {feedback}'", "roles.reward.functions=[{name: 'my:own'}]"),
            "roles.teacher.big.prompt: 'feedback' needs kind forward and colocate_with: policy: other teachers score",
        ),
        (("roles.teacher.big.strategy=spread",), "roles.teacher.big.strategy: engines are placed with the policy's"),
        (
            ("roles.teacher.big={kind: endpoint, colocate_with: policy, url: 'http://x/v1', model: m}",),
            "roles.teacher.big.colocate_with: an endpoint as teacher has separate workers: remove it",
        ),
    ],
)
def test_what_a_teacher_on_the_policys_gpu_cannot_have(
    overrides: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        load(tmp_path, *TAUGHT, *overrides)


def test_rollout_engines_take_what_policy_and_teacher_leave_them(tmp_path: Path) -> None:
    """A tenth stays free while all of them are awake, and vLLM is told the cache of each role."""
    small, gpu = replace(SEVEN_B, backbone=SEVEN_B.backbone // 7, layers=SEVEN_B.layers // 7), int(79.6 * GIB)
    sizes = Sizes({"given": small, "big": SEVEN_B})
    spec = load(tmp_path, *TAUGHT, "roles.policy.offload_optimizer=true", "roles.policy.gradient_checkpointing=true")
    found = plan(spec, [Node("node", 128.0, 1.0, 0, gpu)], sizes)
    (use,) = found.memory.shared
    assert found.misfit == "" and 0.1 <= (use.capacity - use.periods["sampling"]) / use.capacity < 0.13
    engines = shared_engines(spec, gpu, sizes)
    assert {role: cache for role, (cache, _) in engines.items()} == {
        role: found.memory.caches[f"{role}-0"].bytes for role in ("rollout", "teacher.big")
    }
    assert engines["teacher.big"][1] == 0.3
    alone = load(tmp_path, "roles.policy.offload_optimizer=true", "roles.policy.gradient_checkpointing=true")
    more = shared_engines(alone, gpu, sizes)["rollout"][1] - engines["rollout"][1]
    assert 0.3 <= more < 0.36, "the teacher's share, and the logits of its prompts"

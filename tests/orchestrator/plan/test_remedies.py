"""Remedies: following any of them makes a plan fit, or leaves another problem; and their text says what they change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from docs.tooling.layouts import MODELS
from tests.conftest import ROOT
from tests.orchestrator.model_facts.test_families import REAL, folder
from troupe.orchestrator.model_facts.model_size import ModelSize, read_size
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.plan import Plan, described_nodes, plan
from troupe.orchestrator.plan.remedies import Misfit
from troupe.orchestrator.spec.load import plan_runs, read_document

NODE = ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"
ONE_B = ModelSize(
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocabulary=128_256,
    backbone=1_235_814_400,
    largest=262_668_288,
)
SEVEN_B = replace(
    ONE_B,
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152_064,
    backbone=7_070_619_136,
    head=544_997_376,
    largest=544_997_376,
)


def planned(size: ModelSize, cluster: str, gib: float, *changes: str) -> Plan:
    spec = plan_runs(read_document(NODE, ["model.path=given", *changes]))[0].spec
    return plan(spec, described_nodes(cluster, 128, gib), Sizes({"given": size}), advise=True)


def problem(found: Plan) -> str:
    """The misfit without its numbers and its remedies."""
    return re.sub(r"[\d.]+", "N", found.misfit.partition(" GiB")[0].partition(" bundle")[0])


def told(text: str) -> list[dict[str, Any]]:
    """The changes that a misfit's text proposes, read back from it."""
    found = []
    for part in re.split(r", or (?:add nodes)?", text):
        part = part.removesuffix(" and add nodes")
        changes: dict[str, Any] = {}
        for match in re.finditer(r"(?:raise|lower) ((?:[a-z_.]+ and )*[a-z_.]+) to ([\d.]+)", part):
            changes |= dict.fromkeys(match[1].split(" and "), yaml.safe_load(match[2]))
        for match in re.finditer(r"set ((?:[a-z_.]+ and )*[a-z_.]+): (\w+)", part):
            changes |= dict.fromkeys(match[1].split(" and "), yaml.safe_load(match[2]))
        found += [changes] if changes else []
    return found


SEPARATE = st.fixed_dictionaries(
    {
        "roles.policy.workers": st.sampled_from([1, 2, 4, 6]),
        "roles.rollout.workers": st.sampled_from([1, 2, 4]),
        "roles.rollout.max_model_len": st.sampled_from([4096]),
    }
)
COLOCATED = st.builds(
    lambda workers, share: {
        "roles.rollout": f"{{colocate_with: policy, workers: {workers}, gpus: 0.4, gpu_memory_utilization: {share}, "
        "max_model_len: 4096}",
        "roles.policy.workers": workers,
        "roles.policy.gpus": 0.6,
        "weight_sync.backend": "ipc",
        "schedule.max_staleness": 0,
    },
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0.2, 0.4, 0.6, 0.9]),
)
WHOLE = {"roles.policy.gradient_checkpointing": "true"}
PARTLY = WHOLE | {"roles.policy.recompute_products": "false"}
KEPT = tuple(f"{field}={value}" for field, value in PARTLY.items())
TRAINER = st.builds(
    lambda recomputed, others: recomputed | others,
    st.sampled_from([{"roles.policy.gradient_checkpointing": "false"}, PARTLY, WHOLE]),
    st.fixed_dictionaries(
        {
            "roles.policy.zero_stage": st.sampled_from([0, 1, 2, 3]),
            "roles.policy.micro_batch_tokens": st.sampled_from([4096, 16384, 65536]),
        }
    ),
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(SEPARATE, COLOCATED),
    TRAINER,
    st.sampled_from([ONE_B, SEVEN_B]),
    st.sampled_from(["1x8xT4", "1x8xA100-40G", "2x8xA100-40G", "1x8xH100", "4x8xL4", "1x2xH200"]),
    st.sampled_from([0.0, 24.0, 64.0]),
)
def test_following_a_remedy_ends_the_misfit(
    roles: dict[str, Any], trainer: dict[str, Any], size: ModelSize, cluster: str, gib: float
) -> None:
    given_ = [f"{name}={value}" for name, value in {**roles, **trainer}.items()]
    before = planned(size, cluster, gib, *given_)
    assert bool(before.misfit) or not before.remedies
    for remedy in before.remedies:
        after = planned(size, cluster, gib, *given_, *(f"{name}={value}" for name, value in remedy.changes.items()))
        assert (remedy.then is None) == (after.misfit == "")
        assert problem(after) != problem(before), (before.misfit, after.misfit)
    assert told(before.misfit) == [dict(remedy.changes) for remedy in before.remedies]


def test_colocated_roles_keep_one_engine_for_each_policy_worker() -> None:
    shared = (
        "roles.rollout={colocate_with: policy, workers: 2, gpus: 0.4, gpu_memory_utilization: 0.3, max_model_len: 4096}"
    )
    changes = ("roles.policy.gpus=0.6", "weight_sync.backend=ipc", "schedule.max_staleness=0", shared)
    found = planned(SEVEN_B, "1x8xH100", 0, *changes, "roles.policy.workers=2")
    assert found.misfit.startswith("policy-0 and rollout-0 need ")
    raised = [remedy.changes for remedy in found.remedies if "roles.policy.workers" in remedy.changes]
    assert raised and all(dict(c)["roles.rollout.workers"] == dict(c)["roles.policy.workers"] for c in raised)
    assert "raise roles.policy.workers and roles.rollout.workers to " in found.misfit


def test_a_tensor_parallel_size_that_does_not_divide_the_model_is_reported_with_those_that_do() -> None:
    found = planned(
        SEVEN_B,
        "2x8xH100",
        0,
        "roles.rollout.tensor_parallel_size=8",
        "roles.rollout.gpus=8",
        "roles.rollout.workers=1",
    )
    assert found.misfit.startswith(
        "roles.rollout.tensor_parallel_size: 8 does not divide the model's 28 attention heads: "
        "lower roles.rollout.tensor_parallel_size and roles.rollout.gpus to 4"
    )


def test_zero_2_is_proposed_before_what_costs_more_time() -> None:
    """ZeRO-1 of a 7B model keeps all gradients, in two types. Dividing them costs less than other remedies."""
    given_ = ("roles.policy.zero_stage=1", "roles.policy.micro_batch_tokens=4096", "roles.rollout.workers=2")
    found = planned(SEVEN_B, "1x8xH100", 0, *given_, "roles.policy.gradient_checkpointing=false")
    assert re.match(r"policy-0 needs [\d.]+ GiB of a GPU's 79.6: raise roles.policy.zero_stage to 2, or ", found.misfit)
    speeds = [remedy.speed for remedy in found.remedies]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0


@pytest.mark.parametrize(
    ("workers", "given_", "proposed"),
    [
        (
            6,
            ("roles.policy.gradient_checkpointing=false",),
            {"gradient_checkpointing": True, "recompute_products": False},
        ),
        (4, KEPT, {"recompute_products": True}),
    ],
)
def test_products_are_kept_where_they_fit_and_recomputed_where_they_do_not(
    workers: int, given_: tuple[str, ...], proposed: dict[str, bool]
) -> None:
    """Micro-batches of the longest sequence, on GPUs of 45 GiB."""
    fixed = ("roles.policy.micro_batch_tokens=4096", "roles.rollout.workers=2", f"roles.policy.workers={workers}")
    found = planned(SEVEN_B, "1x8xL40S", 0, *fixed, "roles.policy.zero_stage=3", *given_)
    assert {f"roles.policy.{name}": value for name, value in proposed.items()} in [
        one.changes for one in found.remedies
    ]


def test_a_context_too_long_for_one_gpu_is_shared_by_several() -> None:
    """Neither checkpointing nor ZeRO helps any more, and a micro-batch must hold the longest sequence."""
    longest = ("roles.rollout.max_model_len=131072", "roles.policy.micro_batch_tokens=131072")
    node = ("roles.policy.workers=4", "roles.policy.zero_stage=3", "roles.policy.gradient_checkpointing=true")
    found = planned(replace(SEVEN_B, kv_heads=2), "1x8xH100", 0, *longest, *node)
    assert found.misfit.startswith("policy-0 needs ")
    sizes = [dict(remedy.changes).get("roles.policy.sequence_parallel_size") for remedy in found.remedies]
    assert any(sizes)


def test_a_sequence_parallel_size_that_does_not_fit_the_model_is_reported_with_those_that_do() -> None:
    shared = ("roles.policy.workers=8", "roles.rollout.workers=1", "roles.policy.sequence_parallel_size=8")
    found = planned(SEVEN_B, "2x8xH100", 0, *shared)
    assert found.misfit == (
        "roles.policy.sequence_parallel_size: 8 does not divide the model's 28 attention heads: "
        "lower roles.policy.sequence_parallel_size to 4"
    )
    windows = planned(replace(SEVEN_B, heads=32, window=4096, windowed=14), "2x8xH100", 0, *shared)
    assert windows.misfit == (
        "roles.policy.sequence_parallel_size: 8 needs a model without sliding windows: "
        "lower roles.policy.sequence_parallel_size to 1"
    )


def test_a_reference_too_large_for_one_gpu_is_divided() -> None:
    large = "roles.reference={gpus: 1, model: {path: large}}"
    changes = ("model.path=given", "algorithm.kl.coef=0.01", large, "roles.policy.workers=2", "roles.rollout.workers=1")
    spec = plan_runs(read_document(NODE, list(changes)))[0].spec
    sizes = Sizes({"given": ONE_B, "large": replace(SEVEN_B, backbone=45_000_000_000)})
    found = plan(spec, described_nodes("1x8xH100", 128, 0), sizes, advise=True)
    assert found.misfit.startswith("reference-0 needs ")
    assert "raise roles.reference.shards and roles.reference.gpus to 2" in found.misfit
    more = ("roles.reference.shards=2", "roles.reference.gpus=2")
    divided = plan_runs(read_document(NODE, [*changes, *more]))[0].spec
    assert plan(divided, described_nodes("1x8xH100", 128, 0), sizes).misfit == ""


def test_nothing_is_proposed_where_nothing_helps() -> None:
    found = planned(replace(SEVEN_B, backbone=700_000_000_000), "1x8xT4", 0, "roles.rollout.workers=1")
    assert found.remedies == () and found.misfit.endswith("use larger GPUs or a smaller model")


def test_advice_is_not_looked_for_unless_asked() -> None:
    spec = plan_runs(read_document(NODE, ["model.path=given"]))[0].spec
    found = plan(spec, described_nodes("1x8xA100-40G", 128), Sizes({"given": SEVEN_B}))
    assert found.remedies == () and re.fullmatch(r"policy-0 needs [\d.]+ GiB of a GPU's 40.0", found.misfit)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Misfit("gpu", "policy-0", ("policy",), ""), Misfit("gpu", "policy-3", ("policy",), ""), True),
        (Misfit("gpu", "policy-0", ("policy",), ""), Misfit("gpu", "critic-0", ("critic",), ""), False),
        (Misfit("host", "node-0", ("policy",), ""), Misfit("host", "node-1", ("reward",), ""), True),
        (Misfit("gpu", "policy-0", ("policy",), ""), Misfit("cache", "rollout-0", ("rollout",), ""), False),
    ],
)
def test_the_same_problem_elsewhere_is_not_another_one(one: Misfit, other: Misfit, same: bool) -> None:
    assert one.same(other) is same


def test_a_copy_of_the_state_that_does_not_fit_is_said_with_its_field() -> None:
    """The policy's state fits beside the rest only once."""
    beside = planned(SEVEN_B, "1x8xH100", 60.0, "checkpoint.async_save=true")
    assert not planned(SEVEN_B, "1x8xH100", 60.0).misfit
    assert "of host memory" in beside.misfit and "set checkpoint.async_save: false" in beside.misfit


FROZEN = (
    "roles.judge={gpus: 4, tensor_parallel_size: 4, max_model_len: 4096, model: {path: given}}",
    "roles.reward.functions=[{name: judge, args: {rubric: Rate the response., scale: [0, 10]}}]",
    "algorithm.kl.coef=0.01",
    "roles.reference={gpus: 1, model: {path: given}}",
)
TEACHERS = (
    "algorithm.distill={coef: 0.1}",
    "roles.teacher.a={kind: engine, gpus: 1, max_model_len: 4097, model: {path: given}}",
    "roles.teacher.b={gpus: 1, model: {path: given}}",
)
SIXTEEN = ("roles.rollout.tensor_parallel_size=16", "roles.rollout.gpus=16", "roles.rollout.workers=2")
ZERO_3 = ("roles.policy.zero_stage=3", "roles.policy.gradient_checkpointing=true", "roles.policy.workers=64")
NOTHING = ("roles.policy.gradient_checkpointing=false", "roles.policy.zero_stage=1")
EIGHT = ("roles.rollout.tensor_parallel_size=8", "roles.rollout.gpus=8", "roles.rollout.workers=2")


@pytest.mark.parametrize("name", [*MODELS, "mixtral-8x7b"])
@pytest.mark.parametrize("cluster", ["1x1xT4", "1x1xH100", "1x8xH100", "2x8xA100-40G", "4x4xL4", "16x8xH200"])
@pytest.mark.parametrize("given_", [(), EIGHT, (*EIGHT, *ZERO_3), SIXTEEN, FROZEN, TEACHERS, KEPT, NOTHING])
def test_remedies_end(tmp_path: Path, name: str, cluster: str, given_: tuple[str, ...]) -> None:
    """Every chain of remedies reaches a spec without another, and none asks for a worker that no node can hold."""
    config = MODELS[name] if name in MODELS else REAL[name][0]
    size, gpus = read_size(folder(tmp_path, config)), int(cluster.split("x")[1])
    ended: set[frozenset[str]] = set()

    def walk(changes: dict[str, Any], above: tuple[frozenset[str], ...]) -> None:
        here = frozenset(f"{field}={value}" for field, value in changes.items())
        assert here not in above, above
        if here in ended:
            return
        found = planned(size, cluster, 2000.0, *given_, *here)
        if above:
            assert max(row.gpus for row in found.rows) <= gpus
        for remedy in found.remedies:
            walk(changes | dict(remedy.changes), (*above, here))
        ended.add(here)

    walk({}, ())


def test_a_worker_is_on_one_node(tmp_path: Path) -> None:
    """An engine over several nodes is not proposed, and the text says what bounds it."""
    size = read_size(folder(tmp_path, REAL["deepseek-v3"][0]))
    full, large = (planned(size, "32x8xH100", 0, *engines, *ZERO_3) for engines in (EIGHT, SIXTEEN))
    assert full.misfit.endswith(": no setting makes it fit on the 8 GPUs of a node; use larger GPUs or a smaller model")
    asked = (
        "no node is large enough for rollout-0: a worker needs 4 CPU 16 GPU on one node, and the largest has 128 CPU"
    )
    assert large.misfit.startswith(f"{asked} 8 GPU; lower roles.rollout.tensor_parallel_size and roles.rollout.gpus to")
    assert large.misfit.endswith(", or use larger nodes")


def test_a_setting_is_not_proposed_as_it_is() -> None:
    """With ZeRO-3 and checkpointing already set, offloading is all that is proposed, once."""
    found = planned(SEVEN_B, "1x8xA100-40G", 0)
    assert found.misfit.endswith(": set roles.policy.offload_optimizer: true"), found.misfit

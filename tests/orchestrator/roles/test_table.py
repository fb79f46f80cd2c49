"""The table of roles: a row for each, and what it says of a spec."""

from __future__ import annotations

import ast
import inspect
from typing import Any, get_args

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.cluster.worker_group import TrainerGroup, WorkerGroup
from troupe.orchestrator.roles.settings import reference_engine_config, rollout_config, worker_env
from troupe.orchestrator.roles.table import NAMES, ROLES, TRAINERS, Role, named, row_of, settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import models_in
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.roles import RoleName, RolesConfig, ScaledRole
from troupe.orchestrator.spec.sections import FailureConfig
from troupe.workers.contract import roles
from troupe.workers.contract.imports import resolve


def shipped(name: str, *overrides: str) -> RunSpec:
    return plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides))[0].spec


def test_the_table_has_every_role_of_a_spec() -> None:
    assert set(NAMES) == set(get_args(RoleName))
    assert TRAINERS == ("policy", "critic")


def test_no_module_lists_the_roles_again() -> None:
    """A collection of the names of all trainers, engines or roles is in the table only."""
    listed = {frozenset(TRAINERS), frozenset(NAMES), named(lambda row: row.engine)}
    found: list[str] = []
    for file in sorted((ROOT / "orchestrator").rglob("*.py")):
        if file.parent.name in ("roles", "spec"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = frozenset(item.value for item in node.elts if isinstance(item, ast.Constant))
                if names & set(NAMES) in listed:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize("row", ROLES.values(), ids=ROLES)
def test_a_row_agrees_with_the_classes_that_it_names(row: Role) -> None:
    worker = resolve(row.worker)
    wanted = {name for name, _ in inspect.getmembers(row.protocol, inspect.isfunction) if not name.startswith("_")}
    assert wanted <= set(dir(worker))
    assert (roles.Trainer in row.protocol.__mro__) == row.trains
    assert callable(resolve(row.memory))
    if row.group is not None:
        group = resolve(row.group)
        assert issubclass(group, WorkerGroup) and issubclass(group, TrainerGroup) == row.trains
    asynchronous = any(inspect.iscoroutinefunction(getattr(worker, name)) for name in wanted)
    assert row.concurrent == asynchronous


def test_a_role_whose_workers_can_change_has_a_pool_and_restarts() -> None:
    sections = {name: field.annotation for name, field in RolesConfig.model_fields.items()}
    classes: dict[str, Any] = {name: next(models_in(kind)) for name, kind in sections.items()}
    scaled = {name for name, section in classes.items() if issubclass(section, ScaledRole)}
    assert scaled == {row.section for row in ROLES.values() if row.pool is not None}
    for row in ROLES.values():
        assert row.restarts is not None
        assert row.restarts.limit(FailureConfig()) == dict(FailureConfig())[f"{row.restarts.name}_restarts"]
        if row.pool is not None:
            assert inspect.signature(resolve(row.pool)).parameters.keys() == {"run", "role"}


@pytest.mark.parametrize(
    ("role", "worker", "extra"),
    [("rollout", "rollout", 0), ("policy", "policy", 0), ("critic", "critic", 0), ("reward", "reward", 2)],
)
def test_each_role_of_a_rollout_spec_has_worker_settings(role: str, worker: str, extra: int) -> None:
    settings = settings_of(shipped("tiny-ppo"), role)
    assert row_of(shipped("tiny-ppo"), role).kind == worker
    assert len(settings.extra) == extra
    assert settings.threads >= 1 and settings.device == "cpu"


def test_a_reward_worker_takes_its_device_and_the_model() -> None:
    spec = shipped("tiny-ppo", "roles.reward.threads=3")
    settings = settings_of(spec, "reward")
    assert (settings.extra, settings.threads) == (("cpu", spec.model), 3)


@pytest.mark.parametrize(("name", "worker"), [("tiny-dpo", "example_policy"), ("tiny-reward-model", "reward_trainer")])
def test_the_policy_of_an_offline_spec_is_what_the_algorithm_trains(name: str, worker: str) -> None:
    spec = shipped(name)
    assert row_of(spec, "policy").kind == worker
    assert spec.trains == ("reward_model" if worker == "reward_trainer" else "policy")


def test_a_role_without_workers_has_no_settings() -> None:
    inside: dict[str, Any] = {"roles.reference": "{colocate_with: policy}"}
    spec = shipped("tiny-dpo", *(f"{field}={value}" for field, value in inside.items()))
    for role in ("reference", "reward"):
        with pytest.raises(KeyError):
            settings_of(spec, role)


def test_the_environment_of_a_worker_follows_from_its_device() -> None:
    """vLLM chooses its threads on a GPU, and DeepSpeed does not look for a CUDA toolkit there."""
    gpu, cpu = worker_env(0, "cuda"), worker_env(2, "cpu")
    assert "OMP_NUM_THREADS" not in gpu and gpu["DS_IGNORE_CUDA_DETECTION"] == "1" and "DS_ACCELERATOR" not in gpu
    assert (cpu["OMP_NUM_THREADS"], cpu["DS_ACCELERATOR"]) == ("2", "cpu")
    assert cpu["CUDA_VISIBLE_DEVICES"] == "" and "CUDA_VISIBLE_DEVICES" not in gpu, "Ray hides none from a CPU worker"
    assert settings_of(shipped("multinode-ppo"), "rollout").threads == 0
    assert settings_of(shipped("tiny-grpo"), "rollout").threads == 1


def test_engines_on_the_cpu_import_vllm_before_they_are_workers() -> None:
    """What their processes need to know for that is what the worker itself sets."""
    spec = shipped("tiny-judge", "roles.rollout.threads=2")
    found = {name: settings_of(spec, name).engine for name in spec.roles.present()}
    assert {name for name, engine in found.items() if engine is not None} == {"rollout", "judge"}
    rollout, judge = found["rollout"], found["judge"]
    assert rollout is not None and judge is not None
    assert (rollout.threads, rollout.enforce_eager) == (2, True)
    assert rollout == settings_of(spec, "rollout").config.process
    assert settings_of(shipped("node-8gpu-grpo"), "rollout").engine is None


TAUGHT = (
    "algorithm={name: gkd, distill: {k: 8}}",
    "roles.teacher={a: {}, b: {kind: engine, model: {path: .cache/models/tiny-teacher}, threads: 2,"
    " max_model_len: 300}, c: {kind: endpoint, url: 'http://h/v1', model: m, retries: 2}}",
)


def test_a_teacher_has_the_row_of_its_kind() -> None:
    spec = shipped("tiny-grpo", *TAUGHT)
    rows = {name: row_of(spec, name) for name in ("teacher.a", "teacher.b", "teacher.c")}
    assert [row.kind for row in rows.values()] == ["teacher", "teacher_engine", "teacher_endpoint"]
    assert {row.section for row in rows.values()} == {"teacher"} and rows["teacher.b"].engine
    forward, engine, endpoint = (settings_of(spec, name) for name in rows)
    assert forward.config.column == "teacher.a" and forward.engine is None
    assert (engine.config.column, engine.config.top_k, engine.threads) == ("teacher.b", 8, 2)
    assert engine.engine == engine.config.process and engine.micro_batch_tokens == 300
    assert (endpoint.config.column, endpoint.config.top_k, endpoint.config.retries) == ("teacher.c", 8, 2)
    assert endpoint.config.policy == spec.model and endpoint.engine is None
    assert spec.rollouts is not None
    assert endpoint.config.longest == endpoint.micro_batch_tokens == spec.rollouts.roles.rollout.max_model_len
    assert {*spec.rollouts.roles.scaled()} >= {*rows}


def test_engines_of_the_reference_sample_as_rollout_engines_and_record_no_experts() -> None:
    spec = shipped("algorithms/xpo").rollouts
    assert spec is not None
    replayed = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"router_replay": True})})
    rollout, reference = rollout_config(replayed), reference_engine_config(replayed)
    assert rollout.sampling.router_replay
    assert reference is not None and reference.sampling == spec.sampling and reference.model == spec.reference_model

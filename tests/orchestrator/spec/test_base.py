"""What both kinds of spec answer for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import RoleName
from troupe.orchestrator.spec.stages import plan_runs, read_document


def shipped(name: str, *overrides: str) -> RunSpec:
    return plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides))[0].spec


def kind(spec: RunSpec) -> str:
    def rollout(spec: RolloutSpec) -> str:
        return f"rollout {spec.samples_per_step}"

    def offline(spec: OfflineSpec) -> str:
        return f"offline {spec.updates}"

    return spec.dispatch(rollout, offline)


def test_dispatch_calls_the_function_of_the_kind() -> None:
    ppo, dpo = shipped("tiny-ppo"), shipped("tiny-dpo")
    assert kind(ppo).startswith("rollout ") and kind(dpo).startswith("offline ")
    assert ppo.batch_description == f"{kind(ppo).split()[1]} samples"
    assert dpo.batch_description.endswith(" examples")


@pytest.mark.parametrize(
    ("role", "worker", "extra"),
    [("rollout", "rollout", 0), ("policy", "policy", 0), ("critic", "critic", 0), ("reward", "reward", 2)],
)
def test_each_role_of_a_rollout_spec_has_worker_settings(role: RoleName, worker: str, extra: int) -> None:
    settings = shipped("tiny-ppo").worker_settings(role)
    assert (settings.kind, len(settings.args), len(settings.extra)) == (worker, 1, extra)
    assert settings.concurrent == (role == "rollout")
    assert settings.threads >= 1 and settings.device == "cpu"


def test_a_reward_worker_takes_its_device_and_the_model() -> None:
    spec = shipped("tiny-ppo", "roles.reward.threads=3")
    settings = spec.worker_settings("reward")
    assert (settings.extra, settings.threads) == (("cpu", spec.model), 3)


@pytest.mark.parametrize(("name", "worker"), [("tiny-dpo", "example_policy"), ("tiny-reward-model", "reward_trainer")])
def test_the_policy_of_an_offline_spec_is_what_the_algorithm_trains(name: str, worker: str) -> None:
    spec = shipped(name)
    assert spec.worker_settings("policy").kind == worker
    assert spec.trains == ("reward_model" if worker == "reward_trainer" else "policy")


def test_a_role_without_workers_has_no_settings() -> None:
    inside: dict[str, Any] = {"roles.reference": "{colocate_with: policy}"}
    spec = shipped("tiny-dpo", *(f"{field}={value}" for field, value in inside.items()))
    for role in ("reference", "reward"):
        with pytest.raises(KeyError):
            spec.worker_settings(role)


def test_another_model_leaves_the_reference_where_it_was(tmp_path: Path) -> None:
    """The reference of a rollout spec follows the model; offline, it stays the model that training starts from."""
    ppo, dpo = shipped("tiny-ppo"), shipped("tiny-dpo")
    assert ppo.with_model(tmp_path) == [f'model.path="{tmp_path}"']
    moved = shipped("tiny-dpo", *dpo.with_model(tmp_path))
    assert moved.model.path == str(tmp_path) and moved.reference_model == dpo.model

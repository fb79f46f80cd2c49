"""What both kinds of spec answer for themselves."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
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


def test_another_model_leaves_the_reference_where_it_was(tmp_path: Path) -> None:
    """The reference of a rollout spec follows the model; offline, it stays the model that training starts from."""
    ppo, dpo = shipped("tiny-ppo"), shipped("tiny-dpo")
    assert ppo.with_model(tmp_path) == [f'model.path="{tmp_path}"']
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    assert ppo.with_model(tmp_path / "adapter") == [f'model.adapter="{tmp_path}/adapter"']
    moved = shipped("tiny-dpo", *dpo.with_model(tmp_path))
    assert moved.model.path == str(tmp_path) and moved.reference_model == dpo.model

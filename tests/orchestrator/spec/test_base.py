"""What both kinds of spec answer for themselves."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.paths import model_overrides
from troupe.orchestrator.spec.derived.sizes import batch_description
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec


def shipped(name: str, *overrides: str) -> RunSpec:
    return plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides))[0].spec


def test_a_spec_is_of_one_kind() -> None:
    ppo, dpo = shipped("tiny-ppo"), shipped("tiny-dpo")
    assert isinstance(ppo.rollouts, RolloutSpec) and ppo.rollouts is ppo and ppo.offline is None
    assert isinstance(dpo.offline, OfflineSpec) and dpo.offline is dpo and dpo.rollouts is None
    assert batch_description(ppo) == f"{ppo.rollouts.samples_per_step} samples"
    assert batch_description(dpo).endswith(" examples")


def test_another_model_leaves_the_reference_where_it_was(tmp_path: Path) -> None:
    """The reference of a rollout spec follows the model; offline, it stays the model that training starts from."""
    ppo, dpo = shipped("tiny-ppo"), shipped("tiny-dpo")
    assert model_overrides(ppo, tmp_path) == [f'model.path="{tmp_path}"', "model.adapter=null", "model.revision=null"]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    assert model_overrides(ppo, tmp_path / "adapter") == [f'model.adapter="{tmp_path}/adapter"']
    moved = shipped("tiny-dpo", *model_overrides(dpo, tmp_path))
    assert moved.model.path == str(tmp_path) and moved.reference_model == dpo.model

"""`roles.policy.lora`: what it may be, what it cannot be combined with, and where other trainers' names lead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec, parse_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.stages import plan_runs, read_document
from troupe.workers.contract.config import LoraConfig

ROOT = Path(__file__).resolve().parents[3]
SPECS = ROOT / "deploy" / "specs"
FIELD = "roles.policy.lora"


def loaded(*overrides: str) -> RolloutSpec:
    """The tiny GRPO spec with overrides."""
    return load_rollout_spec(SPECS / "tiny-grpo.yaml", list(overrides))


def refusals(*overrides: str, spec: str = "tiny-grpo.yaml") -> str:
    """What is said of a spec with adapters."""
    with pytest.raises(SpecError) as caught:
        parse_spec(read_document(SPECS / spec, [f"{FIELD}={{}}", *overrides]))
    return str(caught.value)


def test_the_section_reaches_policy_and_engines() -> None:
    lora = LoraConfig(rank=4, alpha=4, targets=("q_proj",), rslora=True)
    spec = loaded(f"{FIELD}={json.dumps(lora.model_dump(mode='json'))}")
    assert spec.policy_config().lora == spec.rollout_config().lora == lora
    assert (lora.scaling, lora.reserved_rank) == (2.0, 8)
    assert spec.trains_adapters and not spec.without_adapters().trains_adapters
    assert spec.without_adapters().rollout_config().lora is None


def test_without_the_section_all_weights_train() -> None:
    spec = loaded()
    assert spec.policy_config().lora is spec.rollout_config().lora is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{FIELD}.dropout=0.1", f"{FIELD}.dropout: must be 0: the log-probs of an update"),
        (f"{FIELD}.bias=all", f"{FIELD}.bias: must be none: vLLM loads no biases"),
        (f"{FIELD}.bias=some", f"{FIELD}.bias: "),
        (f"{FIELD}.modules_to_save=[lm_head]", f"{FIELD}.modules_to_save: must be empty: vLLM loads no whole modules"),
        (f"{FIELD}.targets=[]", f"{FIELD}.targets: names no layer"),
        (f"{FIELD}.rank=0", f"{FIELD}.rank: must be at least 1"),
        (f"{FIELD}.rank=513", f"{FIELD}.rank: must be at most 512"),
        (f"{FIELD}.alpha=0", f"{FIELD}.alpha: must be greater than 0"),
        (f"{FIELD}.rnak=8", f"{FIELD}.rnak: unknown field (did you mean 'rank'?)"),
        ("roles.policy.zero_stage=3", "roles.policy.zero_stage: adapters are not supported with ZeRO-3"),
        ("weight_sync.backend=gloo", "weight_sync.backend: gloo sends whole models; adapters use shm"),
        ("roles.rollout.tensor_parallel_size=2", "roles.rollout.tensor_parallel_size: adapters are not supported"),
        (
            "roles.rollout.engine={max_loras: 2}",
            "roles.rollout.engine.max_loras: Troupe sets it: set roles.",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_its_field(override: str, expected: str) -> None:
    assert expected in refusals(override)


def test_workers_that_share_rows_are_refused() -> None:
    found = refusals("roles.policy.workers=2", "roles.policy.sequence_parallel_size=2")
    assert "roles.policy.sequence_parallel_size: adapters are not supported" in found


def test_trpo_is_refused() -> None:
    assert f"{FIELD}: is not supported by trpo" in refusals(spec="algorithms/trpo.yaml")


def test_engines_on_the_gpus_of_the_policy_are_refused() -> None:
    found = refusals("roles.rollout.colocate_with=policy", "roles.rollout.gpus=0.5", "roles.policy.gpus=0.5")
    assert "roles.rollout.colocate_with: adapters are not supported" in found


def test_offline_algorithms_and_critics_say_that_they_have_no_adapters() -> None:
    assert f"{FIELD}: unknown field (adapters train a policy that samples" in refusals(spec="tiny-sft.yaml")
    with pytest.raises(SpecError, match=r"roles\.critic\.lora: unknown field \(adapters train a policy"):
        parse_spec(read_document(SPECS / "tiny-ppo.yaml", ["roles.critic.lora={}"]))


@pytest.mark.parametrize("name", ["lora_rank", "lora_r", "peft_config", "use_peft"])
def test_names_of_other_trainers_lead_to_the_section(name: str) -> None:
    with pytest.raises(SpecError, match=rf"{name}: unknown field \(did you mean 'roles\.policy\.lora\.rank'"):
        loaded(f"{name}=8")


def test_models_with_experts_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = json.loads((ROOT / ".cache/models/tiny-llama/config.json").read_text())
    for experts, said in ((0, False), (4, True)):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"num_local_experts": experts} if experts else config)
        )
        spec = loaded(f"{FIELD}={{}}", f"model.path={tmp_path}")
        found = dict(spec.model_problems({"model": spec.model}))
        assert (found.get(FIELD) == "is not supported for models with experts; train all weights") is said


def test_a_stage_cannot_start_from_adapters(tmp_path: Path) -> None:
    grpo = yaml.safe_load((SPECS / "tiny-grpo.yaml").read_text())
    own = {"first": {"roles": {"policy": {"lora": {}}}}, "second": {"model": {"path": "stage:first"}}}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(grpo | {"stages": own}))
    with pytest.raises(SpecError, match=r"stages\.second\.model\.path: stage first trains adapters"):
        plan_runs(read_document(tmp_path / "chain.yaml"))

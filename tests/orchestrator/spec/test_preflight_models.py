"""Models of the wrong kind, and models that the engines do not support, are refused by their config.json."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.spec.base import RunSpec
from orchestrator.spec.preflight_models import CPU_HEAD_SIZES, unsupported_head_size, wrong_kinds
from orchestrator.spec.stages import plan_runs, read_document
from tests.conftest import ROOT
from workers.contract.config import ModelConfig

CAUSAL: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
CLASSIFIER: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"]}
REWARD: dict[str, Any] = CLASSIFIER | {"id2label": {"0": "LABEL_0"}}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("section", "trains", "config", "wrong"),
    [
        ("model", "policy", CAUSAL, ""),
        ("model", "policy", REWARD, "is a classifier; a language model is needed here"),
        ("roles.reference.model", "policy", REWARD, "is a classifier; a language model is needed here"),
        ("model", "reward_model", CAUSAL, ""),
        ("model", "reward_model", REWARD, ""),
        ("roles.critic.model", "policy", CAUSAL, ""),
        ("roles.critic.model", "policy", REWARD, ""),
        ("roles.reward.model", "policy", REWARD, ""),
        ("roles.reward.model", "policy", CLASSIFIER | {"num_labels": 1}, ""),
        ("roles.reward.model", "policy", CLASSIFIER, "has 2 labels; a reward model has one"),
        ("roles.reward.model", "policy", CLASSIFIER | {"id2label": {"0": "a", "1": "b", "2": "c"}}, "has 3 labels"),
        ("roles.reward.model", "policy", CAUSAL, "is a language model; a reward model is a sequence classifier"),
        ("roles.reward.model", "policy", {"architectures": ["GPT2LMHeadModel"]}, "is a language model"),
        ("roles.reward.model", "policy", {"architectures": ["BertForTokenClassification"]}, "classifies tokens"),
        ("roles.reward.model", "policy", {"architectures": ["OwnForRewardModel"]}, ""),
        ("model", "policy", {}, ""),
        ("model", "policy", {"architectures": "nonsense"}, ""),
    ],
)
def test_a_model_of_the_wrong_kind_is_refused(
    tmp_path: Path, section: str, trains: Any, config: dict[str, Any], wrong: str
) -> None:
    found = list(wrong_kinds({section: ModelConfig(path=folder(tmp_path, config))}, trains))
    assert [path for path, _ in found] == ([f"{section}.path"] if wrong else [])
    assert all(wrong in message for _, message in found)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"head_dim": 64}, None),
        ({"head_dim": 16}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, 16),
        ({"hidden_size": 128, "num_attention_heads": 4}, None),
        ({"text_config": {"head_dim": 48}}, 48),
        ({"head_dim": 16, "kv_lora_rank": 512}, None),
        ({"hidden_size": 64}, None),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
    ],
)
def test_a_head_size_that_the_engine_does_not_support_is_refused(
    tmp_path: Path, config: dict[str, Any], size: int | None
) -> None:
    found = list(unsupported_head_size(Path(folder(tmp_path, config))))
    assert [path for path, _ in found] == ([] if size is None else ["model.path"])
    assert all(f"size {size}" in message for _, message in found)


def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    methods = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    ]
    (answer,) = [node.value for method in methods for node in ast.walk(method) if isinstance(node, ast.Return)]
    assert answer is not None and tuple(ast.literal_eval(answer)) == CPU_HEAD_SIZES


def planned(name: str, *overrides: str) -> RunSpec:
    return plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides))[0].spec


def test_a_spec_checks_its_models_before_anything_starts(tmp_path: Path) -> None:
    path = folder(tmp_path, REWARD | {"head_dim": 16})
    refused = dict(planned("tiny-grpo", f"model.path={path}").missing())
    assert "size 16" in refused["model.path"]
    found = [message for _, message in planned("tiny-grpo", f"model.path={path}").missing()]
    assert any("classifier" in message for message in found)
    on_gpus = planned("tiny-grpo", f"model.path={path}", "roles.policy.gpus=1", "roles.rollout.gpus=1")
    assert not any("size 16" in message for _, message in on_gpus.missing())

"""Models of the wrong kind, and models that the engines do not support, are refused by their config.json."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests.conftest import ROOT
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.machine import missing, model_problems
from troupe.orchestrator.spec.checks.models import (
    CPU_HEAD_SIZES,
    broken_weights,
    headless,
    other_tokenizers,
    quantized,
    smaller_vocabularies,
    undivided_heads,
    undivided_models,
    unsupported_head_size,
    windows_in_some_layers,
    wrong_kinds,
)
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.workers.contract.config_base import ModelConfig

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


_WINDOWS = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}
_KINDS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, True),
        ({"use_sliding_window": False}, False),
        ({"sliding_window": None}, False),
        ({"max_window_layers": 4}, False),
        ({"max_window_layers": 0}, False),
        ({"max_window_layers": "2"}, False),
        ({"layer_types": 2 * _KINDS}, True),
        ({"layer_types": 2 * _KINDS, "max_window_layers": 4}, False),
        ({"layer_types": 4 * _KINDS[:1]}, False),
        ({"model_type": "qwen3"}, False),
    ],
)
def test_sliding_windows_in_some_layers_of_a_qwen2_model_are_refused(
    tmp_path: Path, changed: dict[str, Any], refused: bool
) -> None:
    found = list(windows_in_some_layers(Path(folder(tmp_path, _WINDOWS | changed))))
    assert [path for path, _ in found] == ["model.path"] * refused


@pytest.mark.parametrize(
    ("config", "refused"), [({"num_local_experts": 4}, False), ({}, True), ({"num_hidden_layers": None}, False)]
)
def test_a_model_without_experts_has_no_routes(tmp_path: Path, config: dict[str, Any], refused: bool) -> None:
    """One whose configuration is not known may have some."""
    own = json.loads((ROOT / ".cache/models/tiny-llama/config.json").read_text()) | config
    gpus = ("roles.rollout.gpus=1", "roles.policy.gpus=1", "sampling.router_replay=true")
    spec = planned("tiny-grpo", *gpus, f"model.path={folder(tmp_path, own)}")
    said = ("sampling.router_replay", "the model has no experts to choose: remove it")
    assert (said in model_problems(spec, {"model": spec.model})) is refused


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


AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4}}


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes"])
@pytest.mark.parametrize("section", ["model", "roles.reference.model", "roles.critic.model", "roles.reward.model"])
def test_quantized_weights_are_refused_but_for_a_judge(tmp_path: Path, method: str, section: str) -> None:
    config = CAUSAL | {"quantization_config": {"quant_method": method}}
    model = ModelConfig(path=folder(tmp_path, config))
    ((field, why),) = quantized({section: model, "roles.judge.model": model})
    assert field == f"{section}.path" and why.startswith(f"its weights are quantized ({method}): only a judge")


HEADS: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
}


@pytest.mark.parametrize(
    ("changes", "ranks", "wrong"),
    [
        ({}, 1, ""),
        ({}, 2, ""),
        ({}, 4, "4 does not divide the model's 14 attention heads"),
        ({}, 7, "7 neither divides the model's 2 KV heads nor is a multiple of them"),
        ({"num_key_value_heads": 7}, 7, "7 does not divide the model's feed-forward width, 4864"),
        ({"num_key_value_heads": 7, "intermediate_size": 4900}, 7, "7 does not divide the model's vocabulary, 151936"),
        ({"num_key_value_heads": 7, "intermediate_size": 4900, "vocab_size": 448 * 300 - 63}, 7, ""),
        ({"num_attention_heads": 16}, 8, ""),  # KV heads are repeated
        ({"num_attention_heads": 12, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}, 4, ""),
        ({"num_attention_heads": None}, 4, ""),  # another architecture
    ],
)
def test_a_tensor_parallel_size_must_divide_the_model(
    tmp_path: Path, changes: dict[str, Any], ranks: int, wrong: str
) -> None:
    models = {"model": ModelConfig(path=folder(tmp_path, HEADS | changes))}
    found = list(undivided_models(models, {"model": ("roles.rollout.tensor_parallel_size", ranks)}))
    assert [field for field, _ in found] == (["roles.rollout.tensor_parallel_size"] if wrong else [])
    assert all(why.startswith(wrong) for _, why in found)


def test_text_models_inside_others_are_divided_too(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    gemma["text_config"] |= {"intermediate_size": 10240, "num_hidden_layers": 34}
    models = {"model": ModelConfig(path=folder(tmp_path, gemma))}
    ((_, why),) = undivided_models(models, {"model": ("roles.rollout.tensor_parallel_size", 3)})
    assert why == "3 does not divide the model's 8 attention heads", "the family's default"


LAYERS = ["full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("section", "changes", "size", "wrong"),
    [
        ("model", {}, 1, ""),
        ("model", {"num_key_value_heads": 1}, 7, ""),  # KV heads are repeated
        ("model", {}, 4, "4 does not divide the 14 attention heads of the model"),
        ("roles.critic.model", {}, 4, "4 does not divide the 14 attention heads of roles.critic.model"),
        ("model", {"layer_types": LAYERS}, 2, "must be 1: the model has layers with linear_attention, which"),
        ("model", {"layer_types": LAYERS[:1]}, 2, ""),
        ("model", {"attn_logit_softcapping": 50.0}, 2, "must be 1: the model has a cap on its attention logits, which"),
        ("model", {"layer_types": LAYERS}, 1, ""),
        ("another", {}, 4, ""),
    ],
)
def test_a_sequence_parallel_size_must_divide_the_heads_of_attention_over_all_tokens(
    tmp_path: Path, section: str, changes: dict[str, Any], size: int, wrong: str
) -> None:
    models = {section: ModelConfig(path=folder(tmp_path, HEADS | changes))}
    shared = [(name, f"field of {name}", size) for name in ("model", "roles.critic.model")]
    found = list(undivided_heads(models, shared))
    assert [field for field, _ in found] == ([f"field of {section}"] if wrong else [])
    assert all(why.startswith(wrong) for _, why in found)


def test_every_model_that_shares_rows_is_checked(tmp_path: Path) -> None:
    path = folder(tmp_path, CAUSAL | HEADS | {"head_dim": 64})
    sizes = [f"roles.{role}.sequence_parallel_size=4" for role in ("policy", "critic")]
    workers = [f"roles.{role}.workers=4" for role in ("policy", "critic")]
    spec = planned("tiny-ppo", f"model.path={path}", *sizes, *workers)
    refused = dict(model_problems(spec, spec.models()))
    for role in ("policy", "critic"):
        assert refused[f"roles.{role}.sequence_parallel_size"].startswith("4 does not divide the 14 attention heads of")


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("changes", "size", "wrong"),
    [
        ({}, 2, ""),
        ({}, 4, "4 does not divide the model's 6 experts"),
        ({"model_type": "deepseek_v3"}, 2, "must be 1 for models of type deepseek_v3; supported: mixtral, qwen2_moe"),
        ({"model_type": "llama"}, 1, ""),
    ],
)
def test_an_expert_parallel_size_must_divide_the_experts_of_a_known_family(
    tmp_path: Path, changes: dict[str, Any], size: int, wrong: str
) -> None:
    path = folder(tmp_path, CAUSAL | HEADS | MIXTURE | changes)
    spec = planned(
        "tiny-grpo",
        *(f"model.path={path}", "roles.policy.workers=4", "roles.policy.zero_stage=3"),
        f"roles.policy.expert_parallel_size={size}",
    )
    found = dict(model_problems(spec, spec.models())).get("roles.policy.expert_parallel_size", "")
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)


def whole_model(tmp_path: Path, content: bytes) -> dict[str, ModelConfig]:
    path = folder(tmp_path, CAUSAL)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    return {"model": ModelConfig(path=path)}


def weights(length: int, end: int) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(length)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (weights(16, 16), ""),
        (weights(15, 16), "is incomplete: it has"),
        (b"version https://git-lfs.github.com/spec/v1", "is not a safetensors file"),
    ],
)
def test_weight_files_are_opened(tmp_path: Path, content: bytes, why: str) -> None:
    found = list(broken_weights(whole_model(tmp_path, content)))
    assert [field for field, _ in found] == (["model.path"] if why else [])
    assert all(why in message for _, message in found)


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    models = whole_model(tmp_path, weights(16, 16))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ((field, why),) = broken_weights(models)
    assert field == "model.path" and why.endswith("model-2.safetensors: No such file or directory")


def tensors(*names: str) -> bytes:
    offsets = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps(dict.fromkeys(names, offsets)).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


BODY = ("model.embed_tokens.weight", "model.norm.weight")


@pytest.mark.parametrize(
    ("section", "trains", "config", "names", "refused"),
    [
        ("model", "policy", {"model_type": "llama"}, BODY, True),
        ("roles.reference.model", "policy", {"model_type": "qwen3", "tie_word_embeddings": False}, BODY, True),
        ("roles.judge.model", "policy", {"model_type": "mixtral"}, BODY, True),
        ("model", "reward_model", {"model_type": "llama"}, BODY, False),
        ("roles.critic.model", "policy", {"model_type": "llama"}, BODY, False),
        ("roles.reward.model", "policy", {"model_type": "llama"}, BODY, False),
        ("model", "policy", {"model_type": "llama"}, (*BODY, "lm_head.weight"), False),
        ("model", "policy", {"model_type": "llama", "tie_word_embeddings": True}, BODY, False),
        ("model", "policy", {"model_type": "gemma2"}, BODY, False),
        ("model", "policy", {"model_type": "unknown"}, BODY, False),
        ("model", "policy", {"model_type": "llama"}, ("embedding",), False),
    ],
)
def test_a_language_model_without_its_head_is_refused(
    tmp_path: Path, section: str, trains: Any, config: dict[str, Any], names: tuple[str, ...], refused: bool
) -> None:
    (model,) = whole_model(tmp_path, tensors(*names)).values()
    folder(tmp_path, CAUSAL | config)
    found = list(headless({section: model}, trains))
    assert [field for field, _ in found] == ([f"{section}.path"] if refused else [])
    assert all("no output head (lm_head.weight), and tie_word_embeddings is false" in why for _, why in found)


@pytest.mark.parametrize("section", ["roles.reference.model", "roles.critic.model", "roles.reward.model"])
@pytest.mark.parametrize(("size", "refused"), [(99, True), (100, False), (101, False)])
def test_a_model_that_reads_the_policys_tokens_knows_all_of_them(
    tmp_path: Path, section: str, size: int, refused: bool
) -> None:
    """A reward model may have its own tokenizer."""
    paths = {"model": tmp_path / "policy", section: tmp_path / "other"}
    for path, config in zip(paths.values(), ({"text_config": {"vocab_size": 100}}, {"vocab_size": size}), strict=True):
        path.mkdir()
        folder(path, config)
    found = list(smaller_vocabularies({name: ModelConfig(path=str(path)) for name, path in paths.items()}))
    refused = refused and section != "roles.reward.model"
    assert [field for field, _ in found] == ([f"{section}.path"] if refused else [])
    assert all(why.startswith("its vocabulary has 99 tokens and the trained model's 100") for _, why in found)


def test_a_model_that_reads_the_policys_tokens_has_its_tokenizer(tmp_path: Path) -> None:
    """The first piece of text that is read differently is named; tokens that the policy does not have do not matter."""

    def tokenizer(name: str, *merges: tuple[str, str], added: str = "") -> ModelConfig:
        letters = dict(zip("abcd", range(4), strict=True))
        vocabulary = letters | {"".join(pair): number for number, pair in enumerate(merges, start=4)}
        found = Tokenizer(BPE(vocab=vocabulary, merges=list(merges)))
        found.add_special_tokens([added] if added else [])
        (tmp_path / name).mkdir()
        found.save(str(tmp_path / name / "tokenizer.json"))
        return ModelConfig(path=str(tmp_path / name))

    own = tokenizer("policy", ("a", "b"), ("c", "d"))

    def of(other: ModelConfig, section: str = "roles.reference.model") -> list[Finding]:
        return list(other_tokenizers({"model": own, section: other}))

    assert of(own) == of(tokenizer("more", ("a", "b"), ("c", "d"), ("b", "c"), added="<end>")) == []
    order = tokenizer("order", ("c", "d"), ("a", "b"))
    message = "its tokenizer is another than the trained model's, whose tokens it reads: 'ab' is [5] there and [4] here"
    assert of(order) == [("roles.reference.model.path", message)]
    assert of(order, "roles.critic.model")[0][0] == "roles.critic.model.path"
    assert of(order, "roles.judge.model") == of(ModelConfig(path=str(tmp_path / "nowhere"))) == []
    (Path(order.path) / "tokenizer.json").write_text("{")
    assert of(order) == []


def planned(name: str, *overrides: str) -> RunSpec:
    return plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides))[0].spec


def test_a_spec_checks_its_models_before_anything_starts(tmp_path: Path) -> None:
    path = folder(tmp_path, REWARD | {"head_dim": 16})
    refused = dict(missing(planned("tiny-grpo", f"model.path={path}")))
    assert "size 16" in refused["model.path"]
    found = [message for _, message in missing(planned("tiny-grpo", f"model.path={path}"))]
    assert any("classifier" in message for message in found)
    (tmp_path / "config.json").write_text(json.dumps(CAUSAL | AWQ | {"head_dim": 64, **HEADS}))
    ranks = ("roles.rollout.tensor_parallel_size=4", "roles.rollout.cpus=4")
    refused = dict(missing(planned("tiny-grpo", f"model.path={path}", *ranks)))
    assert "4 does not divide the model's 14 attention heads" in refused["roles.rollout.tensor_parallel_size"]
    found = [message for _, message in missing(planned("tiny-grpo", f"model.path={path}", *ranks))]
    assert any("quantized (awq)" in message for message in found)
    (tmp_path / "config.json").write_text(json.dumps(REWARD | {"head_dim": 16}))
    on_gpus = planned("tiny-grpo", f"model.path={path}", "roles.policy.gpus=1", "roles.rollout.gpus=1")
    assert not any("size 16" in message for _, message in missing(on_gpus))


def test_validate_says_both_before_anything_starts(tmp_path: Path) -> None:
    for name, size in (("policy", 100), ("teacher", 99)):
        (tmp_path / name).mkdir()
        whole_model(tmp_path / name, tensors(*BODY))
        folder(tmp_path / name, CAUSAL | {"model_type": "llama", "vocab_size": size})
    overrides = (f"model.path={tmp_path / 'policy'}", f"roles.reference={{model: {{path: {tmp_path / 'teacher'}}}}}")
    found = [f"{field}: {why}" for field, why in missing(planned("tiny-grpo", *overrides, "algorithm.kl.coef=0.1"))]
    for field in ("model.path", "roles.reference.model.path"):
        assert any(line.startswith(f"{field}: its files hold no output head") for line in found)
    assert any(line.startswith("roles.reference.model.path: its vocabulary has 99 tokens") for line in found)


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        ("roles.rollout.workers=1", []),
        ("roles.rollout.workers=100", ["roles.rollout.workers: 100, but at most 4 groups"]),
        ("roles.reward.workers=100", ["roles.reward.workers: 100, but at most 64 samples"]),
    ],
)
def test_workers_without_work_are_a_warning(override: str, warned: list[str]) -> None:
    spec = planned("tiny-grpo", override)
    assert spec.algorithm.name == "grpo"
    found = warnings_of(spec)
    assert len(found) == len(warned) and all(line.startswith(start) for line, start in zip(found, warned, strict=True))


@pytest.mark.parametrize("field", ["roles.rollout.workers", "roles.reward.workers", "roles.rollout.max_workers"])
def test_an_absurd_number_of_workers_is_refused(field: str) -> None:
    with pytest.raises(SpecError, match=f"{field}: .*16384"):
        planned("tiny-grpo", f"{field}=1000000")

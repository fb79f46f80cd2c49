"""Parameter counts of model families against transformers' own models, built without memory from published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from troupe.orchestrator.model_facts.families import shape_of
from troupe.orchestrator.model_facts.model_size import read_size

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}


def dense(kind: str, hidden: int, width: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    } | more


def experts(all_: int, active: int, width: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": all_, "num_experts_per_tok": active, "moe_intermediate_size": width, **more}


def latent(query: int | None, routed: int, shared: int, active: int, width: int, dense_layers: int) -> dict[str, Any]:
    return {
        "q_lora_rank": query,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": routed,
        "n_shared_experts": shared,
        "num_experts_per_tok": active,
        "moe_intermediate_size": width,
        "first_k_dense_replace": dense_layers,
        "n_group": 1,
        "topk_group": 1,
    }


def gemma3(**text: Any) -> dict[str, Any]:
    """As published: with the fields of the language model that differ from transformers' defaults only."""
    return {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"} | text, "vision_config": SIGLIP}


REAL: dict[str, tuple[dict[str, Any], float]] = {
    "llama-3.1-8b": (dense("llama", 4096, 14336, 32, 32, 8, 128_256), 8.03e9),
    "mistral-7b-v0.1": (dense("mistral", 4096, 14336, 32, 32, 8, 32_000, sliding_window=4096), 7.24e9),
    "qwen2.5-0.5b": (dense("qwen2", 896, 4864, 24, 14, 2, 151_936, tie_word_embeddings=True), 0.494e9),
    "qwen2.5-7b": (dense("qwen2", 3584, 18944, 28, 28, 4, 152_064), 7.62e9),
    "qwen3-8b": (dense("qwen3", 4096, 12288, 36, 32, 8, 151_936, head_dim=128), 8.19e9),
    "mixtral-8x7b": (
        dense("mixtral", 4096, 14336, 32, 32, 8, 32_000, num_local_experts=8, num_experts_per_tok=2),
        46.7e9,
    ),
    "qwen1.5-moe-a2.7b": (
        dense("qwen2_moe", 2048, 5632, 24, 16, 16, 151_936)
        | experts(60, 4, 1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1),
        14.3e9,
    ),
    "qwen2-57b-a14b": (
        dense("qwen2_moe", 3584, 18944, 28, 28, 4, 151_936)
        | experts(64, 8, 2560, shared_expert_intermediate_size=20480, decoder_sparse_step=1),
        57.4e9,
    ),
    "qwen3-30b-a3b": (
        dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936, head_dim=128, mlp_only_layers=[])
        | experts(128, 8, 768, decoder_sparse_step=1),
        30.5e9,
    ),
    "qwen3-235b-a22b": (
        dense("qwen3_moe", 4096, 12288, 94, 64, 4, 151_936, head_dim=128) | experts(128, 8, 1536),
        235e9,
    ),
    "deepseek-v2-lite": (
        dense("deepseek_v2", 2048, 10944, 27, 16, 16, 102_400) | latent(None, 64, 2, 6, 1408, 1),
        15.7e9,
    ),
    "deepseek-v2": (dense("deepseek_v2", 5120, 12288, 60, 128, 128, 102_400) | latent(1536, 160, 2, 6, 1536, 1), 236e9),
    "deepseek-v3": (dense("deepseek_v3", 7168, 18432, 61, 128, 128, 129_280) | latent(1536, 256, 1, 8, 2048, 3), 671e9),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256_000,
            "sliding_window": 4096,
        },
        2.61e9,
    ),
    "gemma-3-1b": (
        dense("gemma3_text", 1152, 6912, 26, 4, 1, 262_144, head_dim=256, sliding_window=512)
        | {"tie_word_embeddings": None, "sliding_window_pattern": 6},
        1.0e9,
    ),
    "gemma-3-4b": (
        gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024),
        4.30e9,
    ),
    "gemma-3-27b": (
        gemma3(
            hidden_size=5376,
            intermediate_size=21504,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            sliding_window=1024,
        ),
        27.4e9,
    ),
}
ODD: dict[str, dict[str, Any]] = {
    "llama with biases": dense("llama", 64, 128, 2, 4, 2, 100, attention_bias=True, mlp_bias=True),
    "dense layers between": dense("qwen3_moe", 64, 128, 6, 4, 2, 100, head_dim=16, attention_bias=True)
    | experts(8, 2, 32, decoder_sparse_step=2, mlp_only_layers=[1]),
    "no bias": dense("qwen2_moe", 64, 128, 3, 4, 2, 100, qkv_bias=False)
    | experts(4, 2, 32, shared_expert_intermediate_size=96),
    "latent with biases": dense("deepseek_v3", 64, 128, 4, 4, 4, 100, attention_bias=True) | latent(24, 4, 1, 2, 32, 2),
    "pooled images": gemma3(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    | {"vision_config": SIGLIP | {"vision_use_head": True, "num_hidden_layers": 2}},
}


def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    given = {name: value for name, value in config.items() if value is not None or name == "q_lora_rank"}
    (tmp_path / "config.json").write_text(json.dumps(given))
    return tmp_path


def built(path: Path) -> tuple[int, int, int]:
    """(parameters, those of an untied output head, the largest) of transformers' model, without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own = 0 if head is None or head.weight is embedding.weight else head.weight.numel()
    return sum(sizes.values()), own, max(sizes.values())


@pytest.mark.parametrize("name", REAL)
def test_counts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    config, published = REAL[name]
    size = read_size(folder(tmp_path, config))
    parameters, head, largest = built(tmp_path)
    assert (size.parameters, size.head, size.largest) == (parameters, head, largest)
    assert size.parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", ODD)
def test_what_configurations_switch_is_counted(tmp_path: Path, name: str) -> None:
    assert read_size(folder(tmp_path, ODD[name])).parameters == built(tmp_path)[0]


@pytest.mark.parametrize(
    ("name", "experts", "width"),
    [
        ("llama-3.1-8b", 0, 14336),
        ("mixtral-8x7b", 2, 2 * 14336),
        ("qwen2-57b-a14b", 8, 8 * 2560 + 20480),
        ("qwen3-30b-a3b", 8, 6144),
        ("deepseek-v3", 8, 8 * 2048 + 2048),
    ],
)
def test_a_token_passes_through_some_experts(name: str, experts: int, width: int) -> None:
    shape = shape_of(REAL[name][0])
    assert (shape.experts, shape.intermediate) == (experts, max(width, REAL[name][0]["intermediate_size"]))


@pytest.mark.parametrize(
    ("name", "window", "windowed"),
    [
        ("llama-3.1-8b", 0, 0),
        ("mistral-7b-v0.1", 4096, 32),
        ("qwen2.5-7b", 0, 0),
        ("gemma-2-2b", 4096, 13),
        ("gemma-3-1b", 512, 22),
        ("gemma-3-27b", 1024, 52),
    ],
)
def test_windows(tmp_path: Path, name: str, window: int, windowed: int) -> None:
    """As transformers derives them, where it lists the layers."""
    from transformers import AutoConfig

    size = read_size(folder(tmp_path, REAL[name][0]))
    assert (size.window, size.windowed) == (window, windowed)
    kinds = getattr(AutoConfig.from_pretrained(tmp_path).get_text_config(), "layer_types", None)
    if kinds is not None and windowed:
        assert kinds.count("sliding_attention") == windowed


def test_a_window_that_is_switched_off_is_none() -> None:
    off = dense("qwen2", 64, 128, 4, 4, 2, 100, sliding_window=4096, use_sliding_window=False)
    assert shape_of(off).windowed == 0


def test_latent_attention_caches_one_vector() -> None:
    shape = shape_of(REAL["deepseek-v3"][0])
    assert (shape.latent, shape.head_dim) == (512 + 64, 128 + 64)


def test_families_with_caps_or_sinks_train_with_eager_attention() -> None:
    gemma = REAL["gemma-2-2b"][0]
    assert shape_of(gemma).eager and not shape_of(gemma | {"attn_logit_softcapping": None}).eager
    assert shape_of(gemma | {"model_type": "gpt_oss"}).eager
    assert not shape_of(REAL["gemma-3-1b"][0]).eager

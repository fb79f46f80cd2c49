"""Models train with attention that computes what eager attention does, caps, sinks, windows and chunks included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BertConfig,
    Cohere2Config,
    DebertaV2Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    VaultGemmaConfig,
    Zamba2Config,
    ZambaConfig,
)

from tests.workers.models.test_capabilities import FALCON, LLAMA4, NO_HEAD_DIM, samples_of_one_prompt
from tests.workers.models.test_modeling import SIZES, save_model
from troupe.workers.models.attention import choose_attention
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, load_causal, load_value
from troupe.workers.models.proxy import proxy_configs
from troupe.workers.models.token_batch import TokenBatch

CAPPED: dict[str, Any] = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
MOE: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FULL = ["full_attention"] * 2
FAMILIES: dict[str, tuple[PreTrainedConfig, str, bool]] = {
    "gemma2-cap": (Gemma2Config(**SIZES, **CAPPED, layer_types=FULL), "eager", False),
    "gemma2-cap-window": (Gemma2Config(**SIZES, **CAPPED, sliding_window=6), "eager", False),
    "gemma2-no-cap": (Gemma2Config(**SIZES, attn_logit_softcapping=None, layer_types=FULL), "sdpa", True),
    "vaultgemma-cap": (VaultGemmaConfig(**SIZES, **CAPPED, sliding_window=6), "eager", False),
    "gpt-oss-sinks": (
        GptOssConfig(**SIZES, num_local_experts=4, sliding_window=6, rope_parameters=None),
        "eager",
        False,
    ),
    "gemma3-window": (Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, sliding_window=6), "sdpa", True),
    "mistral-window": (MistralConfig(**SIZES, sliding_window=6), "sdpa", True),
    "phi3-window": (Phi3Config(**NO_HEAD_DIM, sliding_window=6), "sdpa", True),
    "cohere2-window": (Cohere2Config(**{**SIZES, "num_hidden_layers": 4}, sliding_window=6), "sdpa", True),
    "llama4-chunk": (Llama4TextConfig(**LLAMA4), "sdpa", False),
    "qwen3-moe": (Qwen3MoeConfig(**MOE), "sdpa", True),
    "qwen3": (Qwen3Config(**SIZES), "sdpa", True),
    "qwen2": (Qwen2Config(**NO_HEAD_DIM), "sdpa", True),
    "olmo2": (Olmo2Config(**NO_HEAD_DIM), "sdpa", True),
    "llama": (LlamaConfig(**SIZES), "sdpa", True),
    "gpt2": (GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2), "sdpa", True),
    "falcon-rotary": (FalconConfig(**FALCON), "sdpa", False),
}
"""(configuration, implementation, packs)"""


def measured(module: CausalLogprobs, batch: TokenBatch) -> list[torch.Tensor]:
    """Log-probs of a batch, and the gradient of a weighted sum of them in every parameter."""
    logprobs, _ = module(batch=batch)
    scale = torch.linspace(-1.0, 2.0, len(logprobs))
    parameters = [parameter for _, parameter in sorted(module.model.named_parameters())]
    gradients = torch.autograd.grad((logprobs * scale).sum(), parameters, allow_unused=True)
    return [logprobs.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_with_the_attention_that_they_define(family: str, tmp_path: Path) -> None:
    """Padded, packed and behind one prompt: log-probs and gradients are those of eager attention, sample by sample."""
    config, implementation, packs = FAMILIES[family]
    folder = save_model(config, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    table, rows = samples_of_one_prompt(), (0, 1, 2)
    expected = measured(CausalLogprobs(reference, temperature=1.0), table.batch(rows))
    model = load_causal(folder)
    assert model.config._attn_implementation == implementation
    module = CausalLogprobs(model, temperature=1.0)
    assert adapt(module, model, "cpu", packing=True) == packs
    batches = [table.batch(rows)]
    if packs:
        batches += [table.packed_batch(rows), table.packed_batch(rows, shared=True)]
    for batch in batches:
        for found, wanted in zip(measured(module, batch), expected, strict=True):
            assert (found - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6


@pytest.mark.parametrize("load", [load_causal, load_value])
def test_a_model_whose_two_implementations_contradict_each_other_is_refused(load: Any, tmp_path: Path) -> None:
    """transformers adds the ALiBi of a Falcon twice in eager attention, and once with sdpa."""
    folder = save_model(FalconConfig(**{**FALCON, "alibi": True}), tmp_path)
    with pytest.raises(ValueError, match="FalconForCausalLM computes other states with sdpa than with eager attention"):
        load(folder)


def test_a_critic_gets_the_attention_of_its_model(tmp_path: Path) -> None:
    critic = load_value(save_model(FAMILIES["gemma2-cap"][0], tmp_path))
    assert critic.config._attn_implementation == "eager"


LARGE: dict[str, tuple[PreTrainedConfig, str | None]] = {
    "gemma2": (Gemma2Config(), "eager"),
    "vaultgemma": (VaultGemmaConfig(), "eager"),
    "gpt-oss": (GptOssConfig(), None),
    "gemma3": (Gemma3TextConfig(), None),
    "llama4": (Llama4TextConfig(), None),
    "gemma3n": (Gemma3nTextConfig(), None),
    "falcon-h1": (FalconH1Config(), None),
    "bamba": (BambaConfig(), None),
    "granite-hybrid": (GraniteMoeHybridConfig(num_experts_per_tok=2, num_local_experts=4), None),
    "zamba2": (Zamba2Config(), None),
    "mistral": (MistralConfig(), None),
    "qwen3-moe": (Qwen3MoeConfig(), None),
    "llama-70b": (
        LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128256,
        ),
        None,
    ),
}
"""Configurations of full size, with caps that no state of a model with small random weights reaches."""


@pytest.mark.parametrize("family", LARGE)
def test_the_trial_of_a_large_model_is_small_and_has_a_layer_of_every_kind(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, implementation = LARGE[family]
    config.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    assert choose_attention(str(tmp_path), trust_remote_code=False) == implementation
    assert "could not be compared" not in caplog.text
    assert torch.equal(torch.get_rng_state(), before)
    small = next(proxy_configs(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < 50e6
    kinds = getattr(config, "layer_types", None) or []
    assert set(getattr(small, "layer_types", None) or []) == set(kinds)


def test_a_model_without_attention_is_not_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Mamba2Config().save_pretrained(tmp_path)
    assert choose_attention(str(tmp_path), trust_remote_code=False) is None
    assert not caplog.text


def test_a_model_without_a_small_copy_gets_its_own_attention(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(**SIZES, hidden_act="no such function")
    config.save_pretrained(tmp_path)
    assert choose_attention(str(tmp_path), trust_remote_code=False) == "eager"
    assert "could not be compared" in caplog.text and "no such function" in caplog.text


@pytest.mark.parametrize("config", [ZambaConfig(), DebertaV2Config(), BertConfig()])
def test_models_whose_layers_share_weights_and_encoders_are_tried(
    config: PreTrainedConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.save_pretrained(tmp_path)
    assert choose_attention(str(tmp_path), trust_remote_code=False) is None
    assert "could not be compared" not in caplog.text

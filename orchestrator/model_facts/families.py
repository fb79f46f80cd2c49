"""Shapes and parameter counts of model families, from `config.json` alone.

The formulas follow transformers' models; `tests/orchestrator/model_facts/test_families.py` builds these without memory
and compares the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from troupe.orchestrator.errors import TroupeError

_MOST = 1 << 50
"""Largest number in a configuration that is not taken for a broken file."""
_VOCABULARY_BLOCK = 64
"""vLLM's `DEFAULT_VOCAB_PADDING_SIZE`."""
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA | {"vocab_size": 256_000, "sliding_window": 4096},
    "gemma3": _GEMMA | {"vocab_size": 262_208, "sliding_window": 4096},
    "gemma3_text": _GEMMA | {"vocab_size": 262_208, "sliding_window": 4096},
}
"""Fields that published configurations of a family leave out, with transformers' values."""
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""Families in which every n-th layer attends to all tokens and the others to a window."""
_WINDOWED = ("mistral", "mixtral")
"""Families in which every layer has the window, if there is one."""
_CAPPED, _SINKS = ("gemma2", "vaultgemma"), ("gpt_oss",)
"""Families whose attention only the eager implementation computes."""
_TWO_MORE_NORMS = ("gemma2", "gemma3", "gemma3_text")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_LATENT = ("deepseek_v2", "deepseek_v3")
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class FieldUnknown(TroupeError):
    """A field of a configuration is missing or no number; the message names it."""


@dataclass(frozen=True)
class ModelShape:
    """The facts in a language model's configuration, whatever its family."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward layers that one token passes through."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    """Routed experts that one token passes through; 0: the layers are dense."""
    routed: int = 0
    """All routed experts of a layer."""
    sparse: int = 0
    """Layers with routed experts."""
    expert_weights: int = 0
    """Numbers of all routed experts of a layer, which transformers makes one module of."""
    latent: int = 0
    """Numbers of one token's entry in a compressed KV cache (latent attention); 0: keys and values are cached."""
    window: int = 0
    """Tokens of the sliding window."""
    windowed: int = 0
    """Layers that attend to the window only."""
    extra_norms: int = 0
    """Numbers of a token that one layer normalizes besides twice the hidden size."""
    eager: bool = False
    """Whether it trains with eager attention, which holds the weights of all pairs of tokens
    (`troupe.workers.models.attention`)."""


@dataclass(frozen=True)
class Count:
    """Parameters of a causal language model."""

    backbone: int
    head: int
    """0 if the head shares the embedding's weight."""
    largest: int


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with what its family leaves out."""
    present = {name: value for name, value in config.items() if value is not None}
    return {**config, **_DEFAULTS.get(str(config.get("model_type")), {}), **present}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Shape of a language model. Raises FieldUnknown."""
    config = with_defaults(config)
    kind = str(config.get("model_type"))
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    heads = number(config, "num_attention_heads", "n_head")
    layers = number(config, "num_hidden_layers", "n_layer")
    kv_heads = number(config, "num_key_value_heads", default=heads)
    head_dim = number(config, "head_dim", default=max(1, hidden // heads))
    latent, compressed = 0, 0
    if config.get("kv_lora_rank") is not None:
        rope = number(config, "qk_rope_head_dim")
        head_dim = number(config, "qk_nope_head_dim") + rope
        kv_heads = heads
        latent = number(config, "kv_lora_rank") + rope
        compressed = number(config, "kv_lora_rank") + number(config, "q_lora_rank", default=0, least=0)
    window, windowed = _window(config, kind, layers)
    extra = 2 * hidden if kind in _TWO_MORE_NORMS else 0
    extra += (heads + kv_heads) * head_dim if kind in _HEAD_NORMS else 0
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=_width(config, hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=number(config, "vocab_size"),
        experts=number(config, "num_experts_per_tok", default=1) if _experts(config) else 0,
        routed=_experts(config),
        sparse=_sparse_layers(config, layers) if _experts(config) else 0,
        expert_weights=3 * fused_experts(config) // 2,
        latent=latent,
        window=window,
        windowed=windowed,
        extra_norms=extra + compressed,
        eager=kind in _SINKS or (kind in _CAPPED and bool(config.get("attn_logit_softcapping", True))),
    )


def count_of(config: Mapping[str, Any]) -> Count | None:
    """Parameters of a model of a known family; None for any other. Raises FieldUnknown."""
    config = with_defaults(config)
    kind = config.get("model_type")
    feed_forward = _FEED_FORWARD.get(str(kind))
    if feed_forward is None:
        return None
    shape = shape_of(config)
    embedding = shape.vocabulary * shape.hidden
    norms = (4 if kind in _TWO_MORE_NORMS else 2) * shape.hidden
    attention, layers = _attention(config, shape), feed_forward(config, shape)
    backbone = embedding + shape.layers * (attention + norms) + layers + shape.hidden
    widest = max(shape.intermediate, shape.heads * shape.head_dim)
    return Count(
        backbone=backbone + _vision(config, shape),
        head=0 if config.get("tie_word_embeddings") else embedding,
        largest=max(embedding, shape.hidden * widest, fused_experts(config)),
    )


def has_own_head(config: Mapping[str, Any]) -> bool:
    """Whether a model of a known family has a separate output head: it does not share the embedding's weight."""
    config = with_defaults(config)
    return str(config.get("model_type")) in _FEED_FORWARD and not config.get("tie_word_embeddings")


def fused_experts(config: Mapping[str, Any]) -> int:
    """Numbers in the tensor that transformers makes of the first matrices of a layer's experts; 0 without experts."""
    experts = _experts(config)
    return 2 * experts * number(config, "hidden_size") * _expert_width(config) if experts else 0


def undivided(shape: ModelShape, ranks: int) -> str:
    """Why vLLM cannot divide a model among `ranks` GPUs; empty if it can. It divides attention heads, feed-forward
    layers, the vocabulary (in 64s), and KV heads, or groups of ranks among fewer of these."""
    if shape.heads % ranks:
        return f"does not divide the model's {shape.heads} attention heads"
    if not shape.latent and shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"neither divides the model's {shape.kv_heads} KV heads nor is a multiple of them"
    if not shape.experts and shape.intermediate % ranks:
        return f"does not divide the model's feed-forward width, {shape.intermediate}"
    if (padded := -(-shape.vocabulary // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK) % ranks:
        return f"does not divide the model's vocabulary, {shape.vocabulary} (padded to {padded})"
    return ""


def number(config: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    """The first of several fields that is set, a whole number. Raises FieldUnknown."""
    found = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found < _MOST:
        raise FieldUnknown(f"{names[0]} is {str(found)[:40]}, not a whole number above {least - 1}")
    return found


def _experts(config: Mapping[str, Any]) -> int:
    return number(config, *_EXPERTS, default=0, least=0)


def _expert_width(config: Mapping[str, Any]) -> int:
    return number(config, "moe_intermediate_size", "intermediate_size")


def _width(config: Mapping[str, Any], hidden: int) -> int:
    """Width of the feed-forward layers that one token passes through in the widest layer."""
    dense = number(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if not _experts(config):
        return dense
    routed = number(config, "num_experts_per_tok", default=1) * _expert_width(config)
    shared = number(config, "shared_expert_intermediate_size", default=0, least=0)
    shared += number(config, "n_shared_experts", default=0, least=0) * _expert_width(config)
    every = config.get("model_type") == "mixtral"  # its `intermediate_size` is an expert's
    return max(routed + shared, 0 if every else dense)


def _window(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, int]:
    """(tokens of the sliding window, layers that have it)."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, kinds.count("sliding_attention")
    if kind in _PATTERNS:
        every = number(config, "sliding_window_pattern", default=_PATTERNS[kind])
        return window, layers - layers // every
    return (window, layers) if kind in _WINDOWED else (0, 0)


def _attention(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of one layer's attention with its own norms and biases, without the layer's norms."""
    hidden, kind = shape.hidden, config.get("model_type")
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if kind in _LATENT:
        return _latent_attention(config, shape)
    found = hidden * (2 * q + 2 * kv)
    if kind == "qwen2" or (kind == "qwen2_moe" and config.get("qkv_bias", True)):
        found += q + 2 * kv
    elif kind != "qwen2_moe" and config.get("attention_bias"):
        found += q + 2 * kv + hidden
    return found + (2 * shape.head_dim if kind in _HEAD_NORMS else 0)


def _latent_attention(config: Mapping[str, Any], shape: ModelShape) -> int:
    """DeepSeek-V2 (arXiv 2405.04434): queries, keys and values by way of compressed vectors with norms."""
    hidden, q = shape.hidden, shape.heads * shape.head_dim
    rank, rope = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    values = shape.heads * number(config, "v_head_dim")
    keys = q - shape.heads * rope
    through = number(config, "q_lora_rank", default=0, least=0)
    queries = hidden * through + through + through * q if through else hidden * q
    biases = through + rank + rope + hidden if config.get("attention_bias") else 0
    return queries + hidden * (rank + rope) + rank + rank * (keys + values) + values * hidden + biases


def _dense(config: Mapping[str, Any], shape: ModelShape) -> int:
    biases = 2 * shape.intermediate + shape.hidden if config.get("mlp_bias") else 0
    return shape.layers * (3 * shape.hidden * shape.intermediate + biases)


def _mixture(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Gate, experts and shared experts of the layers that have them, and the dense layers."""
    hidden, experts, kind = shape.hidden, _experts(config), config.get("model_type")
    sparse = _sparse_layers(config, shape.layers) if experts else 0
    shared = number(config, "shared_expert_intermediate_size", default=0, least=0)
    gate = hidden if shared else 0
    if kind in _LATENT:
        shared = number(config, "n_shared_experts", default=0, least=0) * _expert_width(config)
    layer = experts * hidden + experts * 3 * hidden * _expert_width(config) + 3 * hidden * shared + gate
    biased = kind == "deepseek_v2" and bool(config.get("mlp_bias"))
    dense = 3 * hidden * number(config, "intermediate_size")
    if biased:
        dense += 2 * number(config, "intermediate_size") + hidden
        layer += 2 * shared + hidden
    return sparse * layer + (shape.layers - sparse) * dense


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    kind = config.get("model_type")
    if kind == "mixtral":
        return layers
    if kind in _LATENT:
        default = 3 if kind == "deepseek_v3" else 0
        return max(0, layers - number(config, "first_k_dense_replace", default=default, least=0))
    named = config.get("mlp_only_layers")
    dense = set(named) if isinstance(named, list) else set()
    every = number(config, "decoder_sparse_step", default=1)
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)


_FEED_FORWARD: dict[str, Callable[[Mapping[str, Any], ModelShape], int]] = {
    **dict.fromkeys(_DENSE, _dense),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", *_LATENT), _mixture),
}


def _vision(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of Gemma 3's image encoder (SigLIP) and of the projection to the language model."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or config.get("model_type") not in ("gemma3", "gemma3_text"):
        return 0
    hidden, width = number(vision, "hidden_size", default=768), number(vision, "intermediate_size", default=3072)
    patch, image = number(vision, "patch_size", default=16), number(vision, "image_size", default=224)
    embedding = number(vision, "num_channels", default=3) * patch**2 * hidden + hidden + (image // patch) ** 2 * hidden
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * width + width + hidden + 4 * hidden
    pooling = 0
    if vision.get("vision_use_head", True):
        attention = 4 * (hidden * hidden + hidden)
        pooling = hidden + attention + 2 * hidden + 2 * hidden * width + width + hidden
    encoder = embedding + number(vision, "num_hidden_layers", default=12) * layer + 2 * hidden + pooling
    return encoder + hidden * shape.hidden + hidden

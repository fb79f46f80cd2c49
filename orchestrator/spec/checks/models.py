"""Checks that the models of a spec suit their roles, by their folders: configurations, weights, tokenizers."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.orchestrator.algorithms.offline import Trains
from troupe.orchestrator.errors import Finding, nearest
from troupe.orchestrator.model_facts.families import FieldUnknown, ModelShape, shape_of, undivided
from troupe.orchestrator.model_facts.model_size import (
    CONFIG_BYTES,
    SizeUnknown,
    check_weights,
    config_or_empty,
    lacks_head,
    quantization,
    read_config,
)
from troupe.orchestrator.spec.locations import is_hub_name
from troupe.workers.contract.config_base import NO_TEMPLATE, ModelConfig
from troupe.workers.contract.model_files import check_model_files
from troupe.workers.contract.trainer_config import EXPERT_FAMILIES

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`)."""

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_JUDGE = "roles.judge.model"
"""The only model whose weights may be quantized: a vLLM engine uses them as they are, and they never change."""
_EITHER_KIND = "roles.critic.model"
"""A critic takes the backbone of a language model, or a reward model with its head."""
_DEFAULT_LABELS = 2
"""transformers leaves a classifier's labels out of its config.json if there are two."""


def scores_text(section: str) -> bool:
    """Whether a model is a reward model: it reads the conversation through its own tokenizer, and fails samples that
    are too long for it."""
    return section == "roles.reward.model" or section.startswith("roles.reward.models.")


def reads_tokens(section: str) -> bool:
    """Whether a model reads the trained model's tokens and renders no conversation."""
    return section in (_EITHER_KIND, "roles.reference.model") or section.startswith("roles.teacher.")


def missing_models(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Model folders that are missing or incomplete or have a revision, by the path of their field; no names on the
    hub."""
    for section, model in models.items():
        if is_hub_name(model.path):
            continue
        if model.revision is not None:
            yield f"{section}.revision", f"is of a model on the hub, and {model.path} is a folder: remove it"
        if wrong := model_folder(Path(model.path)):
            yield f"{section}.path", wrong


def missing_templates(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Files of chat templates that do not exist, by the path of their field."""
    for section, model in models.items():
        path = model.chat_template
        if path is not None and not model.plain and not Path(path).is_file():
            hint = nearest(path, (NO_TEMPLATE,))
            yield f"{section}.chat_template", f"no such file: {path}" + (f" ({hint})" if hint else "")


def model_folder(folder: Path) -> str:
    """What a folder lacks of a model; empty if it is complete."""
    if not folder.is_dir():
        return f"no such folder: {folder}"
    if not (folder / "config.json").is_file():
        return f"{folder} is not a model folder: it has no config.json"
    if (folder / "config.json").stat().st_size > CONFIG_BYTES:
        return f"{folder / 'config.json'} is larger than {CONFIG_BYTES >> 20} MiB: this is no model's configuration"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors"
    try:
        check_model_files(folder)
    except (OSError, ValueError) as error:
        return str(error)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"{folder} has no tokenizer ({', '.join(TOKENIZERS)})"
    generation = folder / "generation_config.json"
    if generation.is_file() and _is_something_else(generation):
        return f"{generation} is not a JSON object: transformers and vLLM load no model beside it; remove it"
    return ""


def _is_something_else(file: Path) -> bool:
    """Whether a file is JSON, and not an object; libraries ignore one that is no JSON."""
    try:
        return not isinstance(json.loads(file.read_bytes()), dict)
    except ValueError:
        return False


def too_long(models: Mapping[str, ModelConfig], lengths: Mapping[str, int]) -> Iterator[Finding]:
    """Limits on sequences, by field, above what `models` (by path, the trained one first) can take."""
    for section, model in models.items():
        whose = "the model" if section == "model" else section
        config = _text_config(Path(model.path))
        positions, bound = config.get("max_position_embeddings"), _steady_positions(config)
        for field, tokens in lengths.items():
            if bound is not None and tokens > bound[0]:
                why = f"its rotary embedding ({bound[1]}) depends on the longest sequence of a batch"
                beyond = f"the original positions of {whose}: beyond them {why}, and differs from vLLM's"
                yield field, f"{tokens} is more than {bound[0]}, {beyond}"
            elif isinstance(positions, int) and tokens > positions and not scores_text(section):
                yield field, f"{tokens} is more than {whose}'s {positions} positions"


def _steady_positions(config: dict[str, Any]) -> tuple[int, str] | None:
    """(number of first positions whose rotary frequencies do not depend on the batch, their kind), or None without a
    bound. transformers computes "dynamic" and "longrope" frequencies from the longest sequence of a batch; vLLM
    has no dynamic ones, and takes longrope's by `max_model_len`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Gemma 3 and others have parameters for each kind of layer.
    for rope in [found, *found.values()] if isinstance(found, dict) else []:
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
        if kind == "dynamic":
            bound = config.get("max_position_embeddings")
        elif kind in ("longrope", "su"):
            places = (rope, config)
            known = (place.get("original_max_position_embeddings") for place in places)
            bound = next((value for value in known if value is not None), config.get("max_position_embeddings"))
        else:
            continue
        if isinstance(bound, int):
            return bound, kind
    return None


def wrong_kinds(models: Mapping[str, ModelConfig], trains: Trains) -> Iterator[Finding]:
    """Classifiers in place of language models, and the reverse; training of a reward model starts from either."""
    for section, model in models.items():
        config = config_or_empty(Path(model.path))
        kind = _architecture(config)
        if scores_text(section):
            wrong = _not_a_reward_model(kind, config) if model.adapter is None else ""
        elif section == _EITHER_KIND or (section == "model" and trains == "reward_model"):
            continue
        else:
            wrong = f"{kind} is a classifier; a language model is needed here" if kind.endswith(_CLASSIFIERS) else ""
        if wrong:
            yield f"{section}.path", wrong


def unsupported_head_size(model: Path) -> Iterator[Finding]:
    """A size of attention heads that vLLM's CPU build does not support."""
    config = _text_config(model)
    size, heads = config.get("head_dim"), config.get("num_attention_heads")
    if "kv_lora_rank" in config:  # latent attention: the size of the cache's entries is another
        return
    if size is None and isinstance(heads, int) and heads and isinstance(config.get("hidden_size"), int):
        size = config["hidden_size"] // heads
    if isinstance(size, int) and size not in CPU_HEAD_SIZES:
        known = ", ".join(map(str, CPU_HEAD_SIZES))
        why = f"vLLM on the CPU supports {known}; use GPUs or another model"
        yield "model.path", f"attention heads of size {size}: {why}"


def windows_in_some_layers(model: Path) -> Iterator[Finding]:
    """Sliding windows in some layers of a Qwen2 model, which vLLM's class for it refuses when an engine starts."""
    config = _text_config(model)
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    full = config.get("max_window_layers", 28)
    if config.get("model_type") != "qwen2" or not isinstance(layers, int) or not isinstance(full, int):
        return
    mixed = bool(config.get("use_sliding_window")) and config.get("sliding_window", 1) is not None and 0 < full < layers
    if isinstance(kinds, list):  # otherwise transformers makes them of the other fields
        mixed = full != layers and any(kind != kinds[0] for kind in kinds)
    if mixed:
        yield (
            "model.path",
            f"{full} of {layers} layers have no sliding window, and vLLM takes Qwen2 models with it in all or in none; "
            "another model, or use_sliding_window: false in its config.json if no sequence exceeds the window",
        )


def quantized(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Quantized weights that cannot be used, by the path of their field."""
    for section, model in models.items():
        method = quantization(config_or_empty(Path(model.path)))
        if method and section != _JUDGE:
            why = "only a judge uses quantized weights; name the model that they were made from"
            if method == "fp8":
                why += ", or convert them to bfloat16 (docs/guides/model.md#fp8-weights)"
            yield f"{section}.path", f"its weights are quantized ({method}): {why}"


def broken_weights(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Weight files that are missing, damaged or incomplete, by the path of their model's field."""
    for section, model in models.items():
        folder = Path(model.path)
        if folder.is_dir() and not model_folder(folder):
            try:
                check_weights(folder)
            except SizeUnknown as error:
                yield f"{section}.path", str(error)


def headless(models: Mapping[str, ModelConfig], trains: Trains) -> Iterator[Finding]:
    """Language models whose files hold no output head, by the path of their field. Critics and reward models need none,
    nor does the model that a reward model is trained from."""
    for section, model in models.items():
        if scores_text(section) or section == _EITHER_KIND or (section == "model" and trains == "reward_model"):
            continue
        folder = Path(model.path)
        try:
            lacking = not model_folder(folder) and lacks_head(folder)
        except SizeUnknown:  # `broken_weights` reports why
            continue
        if lacking and not _architecture(config_or_empty(folder)).endswith(_CLASSIFIERS):
            why = "tie_word_embeddings is false: it would be random"
            yield f"{section}.path", f"its files hold no output head (lm_head.weight), and {why}"


def smaller_vocabularies(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Models that read the trained model's tokens and have no embedding for some, by the path of their field."""
    if "model" not in models:
        return
    own = _text_config(Path(models["model"].path)).get("vocab_size")
    for section in filter(reads_tokens, models):
        found = _text_config(Path(models[section].path)).get("vocab_size")
        if isinstance(own, int) and isinstance(found, int) and found < own:
            why = "it reads the trained model's tokens, and has no embedding for some"
            yield f"{section}.path", f"its vocabulary has {found} tokens and the trained model's {own}: {why}"


def other_tokenizers(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Models that read the trained model's tokens and whose tokenizer is another, by the path of their field."""
    own = Path(models["model"].path) / TOKENIZERS[0] if "model" in models else Path()
    for section in filter(reads_tokens, models) if own.is_file() else ():
        other = Path(models[section].path) / TOKENIZERS[0]
        if not other.is_file() or filecmp.cmp(own, other, shallow=False):
            continue
        if (found := _tokenized_differently(own, other)) is not None:
            text, ours, theirs = found
            why = "its tokenizer is another than the trained model's, whose tokens it reads"
            yield f"{section}.path", f"{why}: {text!r} is {theirs} there and {ours} here"


def _tokenized_differently(own: Path, other: Path) -> tuple[str, list[int], list[int]] | None:
    """(text, tokens, other tokens) of the first piece of a tokenizer's vocabulary that another one reads differently.
    None without one, or if a file cannot be read, which is reported where it is used."""
    from tokenizers import Tokenizer

    try:
        first, second = (Tokenizer.from_file(str(path)) for path in (own, other))
    except Exception:
        return None
    texts = [first.decode([token], skip_special_tokens=False) for token in range(first.get_vocab_size())]
    read: list[list[list[int]]] = []
    for one in (first, second):
        one.no_padding()
        one.no_truncation()
        read.append([found.ids for found in one.encode_batch(texts, add_special_tokens=False)])
    return next((each for each in zip(texts, *read, strict=True) if each[1] != each[2]), None)


def undivided_models(models: Mapping[str, ModelConfig], ranks: Mapping[str, tuple[str, int]]) -> Iterator[Finding]:
    """Tensor parallel sizes (field, size), by section of the engine's model, that do not divide it."""
    for section, (field, size) in ranks.items():
        if section not in models or size == 1:
            continue
        try:
            why = undivided(shape_of(read_config(Path(models[section].path))), size)
        except (SizeUnknown, FieldUnknown):  # an architecture without these fields, or a folder that is not there
            continue
        if why:
            yield field, f"{size} {why}"


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linear layers of attention, by their most frequent names."""


def has_experts(model: ModelConfig) -> bool:
    """Whether layers of a model have experts, by its config.json; False if that does not define it."""
    shape = _shape(model)
    return shape is not None and shape.experts > 0


def is_dense(model: ModelConfig) -> bool:
    """Whether no layer of a model has experts, by its config.json; False if that does not define it."""
    shape = _shape(model)
    return shape is not None and shape.experts == 0


def undivided_experts(model: ModelConfig, size: int) -> str:
    """Why a model's experts cannot be divided among `size` workers, by its config.json, or empty."""
    kind, shape = _text_config(Path(model.path)).get("model_type"), _shape(model)
    if size == 1 or shape is None:
        return ""
    if kind not in EXPERT_FAMILIES:
        return f"must be 1 for models of type {kind}; supported: {', '.join(EXPERT_FAMILIES)}"
    return f"{size} does not divide the model's {shape.routed} experts" if shape.routed % size else ""


def has_latent_attention(model: ModelConfig) -> bool:
    """Whether a model caches compressed keys and values, by its config.json; False if that does not define it."""
    shape = _shape(model)
    return shape is not None and shape.latent > 0


def _shape(model: ModelConfig) -> ModelShape | None:
    """The model's shape, or None if its config.json lacks the usual fields or its folder does not exist."""
    try:
        return shape_of(read_config(Path(model.path)))
    except (SizeUnknown, FieldUnknown):
        return None


def undivided_heads(models: Mapping[str, ModelConfig], shared: Iterable[tuple[str, str, int]]) -> Iterator[Finding]:
    """Models whose attention cannot be divided among the workers that share their rows, by their config.json. `shared`:
    (section, field, sequence parallel size) of every trained model and its reference."""
    for section, field, size in shared:
        if section not in models or size == 1:
            continue
        config = _text_config(Path(models[section].path))
        whose = "the model" if section == "model" else section
        heads = config.get("num_attention_heads", config.get("n_head"))
        if isinstance(heads, int) and heads % size:
            yield field, f"{size} does not divide the {heads} attention heads of {whose}"
        elif limits := _attention_limits(config):
            yield field, f"must be 1: {whose} has {limits}, which rows divided among workers do not support"


def _attention_limits(config: Mapping[str, Any]) -> str:
    """What keeps a model from taking packed rows, as far as its configuration tells (`workers/models/capabilities`)."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds if kind != "full_attention"}) if isinstance(kinds, list) else []
    if others:
        return f"layers with {' and '.join(others)}"
    return "a cap on its attention logits" if config.get("attn_logit_softcapping") else ""


def _not_a_reward_model(kind: str, config: Mapping[str, Any]) -> str:
    if kind.endswith(_LANGUAGE_MODELS):
        return f"{kind} is a language model; a reward model is a sequence classifier with one label"
    if not kind.endswith(_CLASSIFIERS[0]):
        return f"{kind} classifies tokens; a reward model scores sequences" if kind.endswith(_CLASSIFIERS) else ""
    names = config.get("id2label")
    labels = len(names) if isinstance(names, dict) and names else config.get("num_labels", _DEFAULT_LABELS)
    return "" if labels == 1 else f"{kind} has {labels} labels; a reward model has one"


def _architecture(config: Mapping[str, Any]) -> str:
    """Name of the model's class; empty if the config has none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _text_config(folder: Path) -> dict[str, Any]:
    """The configuration of the language model in a folder; empty if it cannot be read."""
    config = config_or_empty(folder)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config

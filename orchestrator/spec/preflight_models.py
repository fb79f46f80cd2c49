"""Checks of the models that a spec names, by their config.json and the headers of their weight files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.orchestrator.algorithms.offline import Trains
from troupe.orchestrator.model_facts.families import FieldUnknown, shape_of, undivided
from troupe.orchestrator.model_facts.model_size import (
    SizeUnknown,
    check_weights,
    config_or_empty,
    quantization,
    read_config,
)
from troupe.orchestrator.spec.preflight import Finding, model_folder
from troupe.workers.contract.config import ModelConfig

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`)."""

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_REWARD_MODEL = "roles.reward.model"
_JUDGE = "roles.judge.model"
"""The only model whose weights may be quantized: a vLLM engine uses them as they are, and they never change."""
_EITHER_KIND = "roles.critic.model"
"""A critic takes the backbone of a language model, or a reward model with its head."""
_DEFAULT_LABELS = 2
"""transformers leaves a classifier's labels out of its config.json where there are two."""


def wrong_kinds(models: Mapping[str, ModelConfig], trains: Trains) -> Iterator[Finding]:
    """Classifiers in place of language models, and the reverse.

    Args:
        models: The models of a spec by the path of their section; `model` is the trained one.
        trains: What kind of model the run writes; training of a reward model starts from either kind.
    """
    for section, model in models.items():
        config = config_or_empty(Path(model.path))
        kind = _architecture(config)
        if section == _REWARD_MODEL:
            wrong = _not_a_reward_model(kind, config)
        elif section == _EITHER_KIND or (section == "model" and trains == "reward_model"):
            continue
        else:
            wrong = f"{kind} is a classifier; a language model is needed here" if kind.endswith(_CLASSIFIERS) else ""
        if wrong:
            yield f"{section}.path", wrong


def unsupported_head_size(model: Path) -> Iterator[Finding]:
    """A size of attention heads that vLLM's CPU build does not support."""
    config = config_or_empty(model)
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    size, heads = config.get("head_dim"), config.get("num_attention_heads")
    if "kv_lora_rank" in config:  # latent attention: the size of the cache's entries is another
        return
    if size is None and isinstance(heads, int) and heads and isinstance(config.get("hidden_size"), int):
        size = config["hidden_size"] // heads
    if isinstance(size, int) and size not in CPU_HEAD_SIZES:
        known = ", ".join(map(str, CPU_HEAD_SIZES))
        yield (
            "model.path",
            f"attention heads of size {size}: vLLM on the CPU supports {known}; use GPUs or another model",
        )


def quantized(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Quantized weights where they cannot be used, by the path of their field."""
    for section, model in models.items():
        method = quantization(config_or_empty(Path(model.path)))
        if method and section != _JUDGE:
            why = "only a judge uses quantized weights; name the model that they were made from"
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


def undivided_models(models: Mapping[str, ModelConfig], ranks: Mapping[str, tuple[str, int]]) -> Iterator[Finding]:
    """Tensor parallel sizes that do not divide the model of their engine.

    Args:
        models: Models by the path of their section.
        ranks: (field, tensor parallel size) of every engine, by the section of its model.
    """
    for section, (field, size) in ranks.items():
        if section not in models or size == 1:
            continue
        try:
            why = undivided(shape_of(read_config(Path(models[section].path))), size)
        except (SizeUnknown, FieldUnknown):  # an architecture without these fields, or a folder that is not there
            continue
        if why:
            yield field, f"{size} {why}"


def _not_a_reward_model(kind: str, config: Mapping[str, Any]) -> str:
    if kind.endswith(_LANGUAGE_MODELS):
        return f"{kind} is a language model; a reward model is a sequence classifier with one label"
    if not kind.endswith(_CLASSIFIERS[0]):
        return f"{kind} classifies tokens; a reward model scores sequences" if kind.endswith(_CLASSIFIERS) else ""
    names = config.get("id2label")
    labels = len(names) if isinstance(names, dict) and names else config.get("num_labels", _DEFAULT_LABELS)
    return "" if labels == 1 else f"{kind} has {labels} labels; a reward model has one"


def _architecture(config: Mapping[str, Any]) -> str:
    """Name of the model's class; empty where the config does not say."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

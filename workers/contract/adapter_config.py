"""peft's `adapter_config.json`: what is supported of it, and how it differs from the adapters of a spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from troupe.workers.contract.text import one_line
from troupe.workers.contract.trainer_config import LoraConfig

ADAPTER_CONFIG = "adapter_config.json"
"""peft's name of the configuration in the folder of an adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""peft's name of the tensors in the folder of an adapter."""
BASE_DIGEST = "base_digest"
"""Key of the digest of the model below (`troupe.workers.models.digests`), in the metadata of the tensors' file."""
SCORE = "score"
"""Name of the head of a reward model or critic."""
SCORES = "SEQ_CLS"
"""peft's `task_type` of an adapter for a reward model or critic."""

_UNSUPPORTED = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("megatron_config", "alora_invocation_tokens", "velora_config", "arrow_config", "monteclora_config"),
)
"""Settings of peft with which an adapter is more, or something else, than B A on whole linear layers."""

_BASE_AS_IT_WAS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model below as it is; PiSSA, OLoRA, CorDA and LoftQ change it."""


def parse_settings(text: bytes | str) -> dict[str, Any]:
    """The settings in an `adapter_config.json`. Raises ValueError if it does not hold a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("does not contain a JSON object")
    return found


def unsupported_setting(config: Mapping[str, Any]) -> str:
    """What of a configuration is not supported, as text; empty if all is."""
    if config.get("peft_type") != "LORA":
        return f"its peft_type is {_shown(config.get('peft_type'))}: only LORA is supported"
    if missing := [name for name in ("r", "lora_alpha", "target_modules") if not config.get(name)]:
        return f"its configuration has no {missing[0]}"
    for name, (is_valid, expected) in _TYPES.items():
        if name in config and not is_valid(config[name]):
            return f"its {name} is {_shown(config[name])}: expected {expected}"
    if config.get("bias", "none") != "none":
        return f"it has biases ({_shown(config['bias'])}), which are not supported"
    whole = config.get("modules_to_save") or []
    if set(whole) - {SCORE}:
        return f"it has modules that were trained whole ({_shown(', '.join(whole))}): only {SCORE} is supported"
    if (start := config.get("init_lora_weights", True)) not in _BASE_AS_IT_WAS:
        return f"it was trained on weights that peft changed at its start (init_lora_weights: {_shown(start)})"
    found = next((name for name in _UNSUPPORTED if config.get(name)), "")
    return f"it has {found}, which is not supported" if found else ""


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST_RANK


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_ALPHA


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_MOST_RANK, _MOST_ALPHA = 1 << 16, 1e9
_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "r": (_is_rank, f"a whole number from 1 to {_MOST_RANK}"),
    "lora_alpha": (_is_alpha, f"a number above 0, at most {_MOST_ALPHA:g}"),
    "target_modules": (lambda value: isinstance(value, str) or _is_names(value), "text or a list of names"),
    "modules_to_save": (lambda value: value is None or _is_names(value), "a list of names"),
    "use_rslora": (lambda value: isinstance(value, bool | None), "true or false"),
    "base_model_name_or_path": (lambda value: isinstance(value, str | None), "text"),
}
"""What the values of settings have to be: a test, and its text."""


def _shown(value: object) -> str:
    return one_line(str(value), 60)


def difference(config: Mapping[str, Any], lora: LoraConfig) -> tuple[str, str]:
    """(field of `lora`, how it differs from what an adapter was trained with); empty if nothing does."""
    settings = (("rank", "r"), ("alpha", "lora_alpha"), ("rslora", "use_rslora"))
    for field, name in settings:
        own, found = dict(lora)[field], config.get(name, False)
        if own != found:
            return field, f"is {own}, but {found} in the adapter that training starts from"
    targets = config["target_modules"]
    if isinstance(lora.targets, tuple) and isinstance(targets, list) and set(lora.targets) != set(targets):
        return "targets", f"are not those of the adapter that training starts from: {', '.join(sorted(targets))}"
    return "", ""


def as_peft(lora: LoraConfig) -> dict[str, Any]:
    """What `difference` reads of the configuration of an adapter that is trained with these settings."""
    targets = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    return {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "target_modules": targets}


def scaling(config: Mapping[str, Any]) -> float:
    """Factor of B A."""
    rank = config["r"]
    return config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)

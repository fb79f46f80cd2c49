"""Proxies of a model, to try out what it can do: the same kinds of layers, few of them, narrow, with random weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from troupe.workers.contract.config_base import Device
from troupe.workers.models.exact import disable_dropout
from troupe.workers.models.partitioned import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

VOCABULARY = 64
_SPAN = 6
"""Tokens of a window or chunk of attention in a copy, so that a short text exceeds it."""
_SCANNED = 16
"""Tokens of a chunk that a recurrent layer computes at once; the result does not depend on it."""
_LEAST_LAYERS = 2
_MOST_LAYERS = 6
_KINDS = 4
"""Most values of a list with an entry for every layer that names kinds of layers; others hold numbers of layers."""
_FEED_FORWARD = 32
_WIDEST = 1024
_RECURRENT_HEADS = ("mamba_n_heads", "n_mamba_heads")
_RECURRENT_SIZES = ("mamba_d_head", "mamba_headdim")
_HYBRIDS = "hybrid_layer_ids"
"""Field with the numbers of layers that have attention."""
_CAP = 1.0
"""Cap of logits in a copy, so that random weights exceed it."""
_GAIN = 2.0
"""Standard deviation of a layer's outputs for inputs with 1: large enough that tokens attend to few others."""


def proxy_for(model: PreTrainedModel, small: bool = False, device: Device | None = None) -> PreTrainedModel | None:
    """A model to try out what this one can do: itself, or a small copy of its class, type and attention with random
    weights and short windows, if it is partitioned or will run on another device. With `small` the copy is
    preferred: it amplifies rounding little, while states of a trained model in bfloat16 can differ by more than
    their length if tokens are rare. Without a copy that runs it is the model, or None if that is partitioned: the
    caller assumes the least."""
    whole = not any(is_partitioned(parameter) for parameter in model.parameters())
    elsewhere = device is not None and device != model.device.type
    if whole and not small and not elsewhere:
        return model
    place = torch.device(device) if device is not None and elsewhere else model.device
    config = model.config
    if config.get_text_config() is config and hasattr(config, "num_attention_heads"):
        for smaller in proxy_configs(config):
            try:
                return _built(model, smaller, place)
            except Exception as error:  # an architecture may refuse the sizes in any way
                logger.info("no small copy of %s: %s", type(model).__name__, error)
    if whole:
        return model
    logger.warning("%s is not tried out, as it has no small copy: it is assumed to do the least", type(model).__name__)
    return None


def _built(model: PreTrainedModel, small: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # all ranks must come to the same result
        tried: PreTrainedModel = type(model)._from_config(
            copy.deepcopy(small), dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
        randomize(tried)
        disable_dropout(tried)
        nn.Module.to(tried.eval(), device)
        tried.base_model(input_ids=torch.arange(VOCABULARY // 2, device=device)[None], use_cache=False)
    return tried


def proxy_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Small copies of a text model's configuration, the smallest first: an architecture may refuse its widths. A
    copy has a layer of every kind, heads of their size in groups, and windows and chunks of `_SPAN` tokens. Later
    ones keep width and heads, unless that takes seconds, and two layers of every kind: in a Zamba such layers
    share weights."""
    for count in (1, 2):
        yield from _configs(config, count)


def _configs(config: PreTrainedConfig, count: int) -> Iterator[PreTrainedConfig]:
    small = copy.deepcopy(config)
    _cut_layers(small, count)
    for name, value in list(vars(small).items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            _cut_number(small, name, value)
        elif isinstance(value, list) and "intermediate" in name:
            setattr(small, name, [min(width, _FEED_FORWARD) for width in value])
    narrow = copy.deepcopy(small)
    _cut_heads(narrow)
    yield narrow
    if small.hidden_size <= _WIDEST:
        yield small


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draw the weights of a small copy so that layers have effects: usually tokens attend to all others equally."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=_GAIN * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def _cut_layers(config: Any, each: int) -> None:
    """Keep the first `each` layers of every kind, and at least two layers."""
    count = config.num_hidden_layers
    by_layer = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    kinds = [values for values in by_layer.values() if len({str(value) for value in values}) <= _KINDS]
    first: dict[tuple[str, ...], list[int]] = {}
    for layer in range(count):
        first.setdefault(tuple(str(values[layer]) for values in kinds), []).append(layer)
    kept = sorted(layer for layers in first.values() for layer in layers[:each])[:_MOST_LAYERS]
    kept = sorted({*kept, *range(min(count, _LEAST_LAYERS))}) if len(kept) < _LEAST_LAYERS else kept
    for name, values in by_layer.items():
        setattr(config, name, [values[layer] for layer in kept])
    if hasattr(config, _HYBRIDS):
        setattr(config, _HYBRIDS, [place for place, layer in enumerate(kept) if layer in getattr(config, _HYBRIDS)])
    config.num_hidden_layers = len(kept)


def _cut_number(config: Any, name: str, value: float) -> None:
    if name.endswith("_token_id") or name == "num_kv_shared_layers":
        setattr(config, name, 0)
    elif "vocab_size" in name:
        setattr(config, name, VOCABULARY)
    elif "window" in name or "attention_chunk" in name:
        setattr(config, name, min(value, _SPAN))
    elif "chunk_size" in name:
        setattr(config, name, min(value, _SCANNED))
    elif "softcap" in name:
        setattr(config, name, min(value, _CAP))
    elif "intermediate" in name or "ffn_hidden_size" in name or name in ("ffn_dim", "n_inner"):
        setattr(config, name, min(value, _FEED_FORWARD))


def _cut_heads(config: Any) -> None:
    """Keep at most two heads of keys and at most two of queries to each of them."""
    heads = config.num_attention_heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    size, groups = config.hidden_size // heads, heads // of_keys
    of_keys = min(of_keys, 2)
    config.num_attention_heads = of_keys * min(groups, 2)
    before, config.hidden_size = config.hidden_size, size * config.num_attention_heads
    if hasattr(config, "attention_hidden_size"):  # a multiple, if attention reads the embeddings besides
        config.attention_hidden_size = config.attention_hidden_size * config.hidden_size // before
    _cut_recurrent_heads(config, before)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = of_keys


def _cut_recurrent_heads(config: Any, hidden_size: int) -> None:
    """Make the heads of recurrent layers, as in Bamba and Zamba 2, as wide together as the states are multiplied."""
    expand = getattr(config, "mamba_expand", None)
    names = [[name for name in known if hasattr(config, name)] for known in (_RECURRENT_HEADS, _RECURRENT_SIZES)]
    if not expand or not all(names):
        return
    (heads, *_), (size, *_) = names
    if getattr(config, heads) * getattr(config, size) != int(expand * hidden_size):
        return
    width = int(expand * config.hidden_size)
    if width % getattr(config, size) == 0:
        setattr(config, heads, width // getattr(config, size))
    else:
        setattr(config, size, width // getattr(config, heads))

"""The attention implementation that a model trains with: the fastest one that computes what the model defines.

transformers runs most models with torch's `scaled_dot_product_attention` (`sdpa`), which takes no caps of the attention
logits, no sinks and no bias, and ignores the ones that a model passes. The sampler applies them. The model's own
`eager` implementation does too, and so both are tried on a small copy of the model before it is loaded.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from troupe.workers.contract.config_base import Device
from troupe.workers.contract.text import one_line
from troupe.workers.models.exact import ieee_float32
from troupe.workers.models.proxy import VOCABULARY, proxy_configs, randomize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

EAGER = "eager"
_ROUNDING = 5e-5
"""Largest distance of the states of two implementations that rounding explains in float32, as a fraction of their
length. It gives 1e-6; a cap of 50 on attention logits 1e-3."""
_LENGTHS = (24, 17)
"""Lengths of the tried texts, in tokens: one is padded, and both are longer than every window of a small copy."""


def choose_attention(path: str, trust_remote_code: bool) -> str | None:
    """The implementation to load the model of a folder with, or None for transformers' default, both tried on the
    training device; eager attention for a model that cannot be tried. Raises OSError, and ValueError if the
    default is not eager attention and the model defines which is right in an unknown way."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    text = config.get_text_config()
    if not hasattr(text, "num_attention_heads"):
        return None
    reason = ""
    for small in proxy_configs(text):
        try:
            model, distance = _compare(small, trust_remote_code)
        except Exception as error:  # an architecture may refuse the sizes in any way
            reason = one_line(f"{type(error).__name__}: {error}")
            continue
        if distance <= _ROUNDING:
            return None
        return _eager(path, model, distance)
    logger.warning(
        "%s runs with eager attention: transformers' default could not be compared with it on a small copy of the "
        "model: %s",
        *(Path(path).name, reason),
    )
    return EAGER


def _eager(path: str, model: PreTrainedModel, distance: float) -> str:
    kind, default = type(model).__name__, model.config._attn_implementation
    if not model._can_set_attn_implementation():
        # The layers contain the code of both, and one of the two has an error.
        raise ValueError(
            f"{path}: {kind} computes other states with {default} than with eager attention (a distance of "
            f"{distance:.1%}), and which of them the sampler computes is unknown: this version of transformers cannot "
            "train it"
        )
    logger.warning(
        "%s runs with eager attention: %s ignores a part of its attention, and its states are off by %.1g%%",
        *(kind, default, 100.0 * distance),
    )
    return EAGER


@ieee_float32()
def _compare(small: PreTrainedConfig, trust_remote_code: bool) -> tuple[PreTrainedModel, float]:
    """(model, distance): a random model by default, and how far its states are from eager ones, as a share of them."""
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # all ranks must come to the same result
        model = _build(small, trust_remote_code)
        if model.config._attn_implementation == EAGER:
            return model, 0.0
        randomize(model)
        eager = _build(small, trust_remote_code, attn_implementation=EAGER)
        eager.load_state_dict(model.state_dict())
        found, expected = (_states(one, device) for one in (model, eager))
    return model, float((found - expected).norm() / expected.norm())


def _build(small: PreTrainedConfig, trust_remote_code: bool, **arguments: str) -> PreTrainedModel:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    # Some reward models are encoders. The code of a model outside of transformers is found in its configuration.
    has_head = type(small) in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(small, "auto_map")
    model: PreTrainedModel = (AutoModelForCausalLM if has_head else AutoModel).from_config(
        copy.deepcopy(small), dtype=torch.float32, trust_remote_code=trust_remote_code, **arguments
    )
    return model.eval()


def _states(model: PreTrainedModel, device: Device) -> torch.Tensor:
    """float32 [tokens, hidden size], of the tokens of two texts, one of them padded on the right."""
    torch.nn.Module.to(model, device)
    mask = (torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]).long().to(device)
    ids = (7 * torch.arange(mask.numel(), device=device).view_as(mask) + 2) % VOCABULARY
    output: Any = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return output[0][mask.bool()].float()

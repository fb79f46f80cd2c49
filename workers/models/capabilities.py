"""What a model can do, tried out by running it on a few tokens before it is trained.

Every function takes the module of a whole model, as it is loaded: under ZeRO-3 a model that raises halfway through a
pass would leave DeepSpeed's hooks in an undefined state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from troupe.workers.models.modeling import CausalLogprobs, ModelModule, evaluating, score
from troupe.workers.models.token_batch import TokenBatch, TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Largest difference of two ways to compute the same, as a fraction of the largest number, by the type of the weights:
rounding stays below it."""
_RESPONSES = ([11, 13], [17, 19, 23])
_NOISE = ("drop", "jitter", "noise")
"""Parts of the names of configuration fields that make a model random."""


def packs(module: CausalLogprobs) -> bool:
    """Whether the model isolates sequences that are concatenated in one row; tested by running it.

    False for attention within chunks: a chunk starts where the row does, and the test is too short to show its effect.
    """
    if any("chunk" in name for name in _attention_limits(module)):
        return False
    apart = _group([3], *_RESPONSES).batch((0, 1)).to(module.model.device)
    there = apart.attention_mask.bool()
    places = torch.arange(there.shape[1], device=there.device).expand_as(there)[there]
    positions = places.nonzero()[:, 0] - 1
    row = replace(apart, input_ids=apart.input_ids[there][None], positions=positions, position_ids=places[None])
    return _isolates(module, apart, row, mask=None)


def shares_prompts(module: CausalLogprobs) -> bool:
    """Whether responses behind one shared copy of their prompt keep their log-probs; tested by running the model.

    False for attention within windows or chunks: the mask of the shared prompt would replace theirs, and the test is
    too short to show it.
    """
    if _attention_limits(module):
        return False
    table = _group([3, 5, 7], *_RESPONSES)
    apart, row = (batch.to(module.model.device) for batch in (table.batch((0, 1)), table.shared_batch((0, 1))))
    return _isolates(module, apart, row, row.attention_mask)


def _isolates(module: CausalLogprobs, apart: TokenBatch, row: TokenBatch, mask: torch.Tensor | None) -> bool:
    """Whether two responses have the same log-probs in one `row` as `apart`, and the second does not see the first.

    A token that must not be seen has weight 0, and so its embedding has a gradient of exactly 0.
    """
    try:
        expected = score(module, apart)
        with evaluating(module), _embedded(module.model) as embedded, torch.enable_grad():
            found = module(row.input_ids, mask, row.positions, row.targets, row.position_ids)[0]
        (gradient,) = torch.autograd.grad(found[apart.sequence == 1].sum(), embedded)
    except Exception as error:  # a model may refuse the positions or the mask in any way
        logger.info("%s takes one response to a row: %s", type(module.model).__name__, error)
        return False
    tolerance = _TOLERANCE[module.model.dtype]
    near = float((found.detach() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))
    foreign = torch.isin(row.input_ids, apart.targets[apart.sequence == 0])
    return near and not bool(gradient[foreign].any())


@contextmanager
def _embedded(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The embeddings of the tokens that the model runs on inside the block, with gradients."""
    found: list[torch.Tensor] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *call: found.append(call[-1].requires_grad_()))
    try:
        yield found
    finally:
        handle.remove()


def _attention_limits(module: CausalLogprobs) -> set[str]:
    """What keeps some token from attending to all earlier ones: kinds of layers, or fields with a window or chunk.

    A window is no limit where it is as long as the longest sequence of the model.
    """
    config = module.model.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return {kind for kind in kinds if kind != "full_attention"}
    longest = getattr(config, "max_position_embeddings", None) or float("inf")
    return {
        name
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name) and isinstance(value, int) and 0 < value < longest
    }


def _group(prompt: list[int], *responses: list[int]) -> TokenTable:
    """Table of the responses to one prompt."""
    rows = [
        {
            "prompt_uid": "p",
            "sample_index": number,
            "prompt_ids": prompt,
            "response_ids": ids,
            "loss_mask": [True] * len(ids),
        }
        for number, ids in enumerate(responses)
    ]
    return TokenTable(pa.Table.from_pylist(rows))


def check_deterministic(module: ModelModule, model: PreTrainedModel) -> None:
    """Refuse a model that computes something else in training than in evaluation, or something else every time.

    The ratio of new to old policy must be 1 before an update. A module in training mode keeps its model in evaluation
    mode, but for the layers that recompute their activations; tested by running it in the mode it is in.

    Args:
        module: The module to train, in training mode.
        model: The model inside it.

    Raises:
        ValueError: names the configuration fields that make the model random.
    """
    noise, kind = _noise(module, model), type(model).__name__
    if noise:
        fields = " and ".join(_noisy_fields(module, model))
        remedy = f"set {fields} to 0 in its config.json" if fields else "no field of its config.json explains it"
        raise ValueError(
            f"{kind} is not deterministic in training mode: the states of the same tokens differ by up to {noise:.2g}; "
            f"{remedy}, or train without gradient_checkpointing"
        )


@torch.no_grad()
def _noise(module: ModelModule, model: PreTrainedModel) -> float:
    """Largest difference between the states of two passes in the module's mode, or of one to evaluation mode.

    0 where it is rounding: of the size of that between two passes in evaluation mode, because some kernels add in any
    order.
    """
    ids = (7 * torch.arange(16, device=model.device) % model.config.get_text_config().vocab_size)[None]

    def states() -> torch.Tensor:
        return model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0].float()

    def largest(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().max())

    trained, again = states(), states()
    with evaluating(module):
        evaluated, floor = states(), largest(states(), states())
    rounding = _TOLERANCE[model.dtype] * float(evaluated.abs().max())
    noise, gap = largest(trained, again), largest(trained, evaluated)
    if noise > min(4.0 * floor, rounding):
        return noise
    return gap if gap > rounding else 0.0


def _noisy_fields(module: ModelModule, model: PreTrainedModel) -> list[str]:
    """The configuration fields that must be 0 for the model not to be random; none, if that does not help."""
    config = model.config.get_text_config()
    values = {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, float) and value > 0.0 and any(part in name for part in _NOISE)
    }
    for name in values:
        setattr(config, name, 0.0)
    quiet, needed = _noise(module, model) == 0.0, []
    for name, value in values.items():
        setattr(config, name, value)
        if quiet and _noise(module, model) > 0.0:
            needed.append(name)
            setattr(config, name, 0.0)
    for name in needed:
        setattr(config, name, values[name])
    return needed

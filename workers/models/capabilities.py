"""What a model can do, tried out by running it on a few tokens before it is trained.

Every function takes a model as it is loaded, before DeepSpeed: under ZeRO-3 a model that raises halfway through a pass
would leave DeepSpeed's hooks in an undefined state. A model that is partitioned by then is tried out as a small copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from troupe.workers.contract.config_base import Device
from troupe.workers.models import sequence_parallel
from troupe.workers.models.exact import ieee_float32
from troupe.workers.models.modeling import ModelModule, evaluating
from troupe.workers.models.packed_attention import install, uninstall, use_fastest_kernel
from troupe.workers.models.partitioned import is_partitioned
from troupe.workers.models.proxy import proxy_for
from troupe.workers.models.sequence_parallel import SequenceGroup
from troupe.workers.models.token_batch import TokenBatch, TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest difference of two ways to compute the same, as a fraction of the largest number, by the type of the weights:
rounding stays below it."""
ROUNDING = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest distance of two ways to compute the same states, as a fraction of their length, by the type of the weights.
Rounding gives 0.01 in bfloat16; a wrong position 0.1, and a token that is seen wrongly 0.2."""
_NOISE = ("drop", "jitter", "noise")
"""Parts of the names of configuration fields that make a model random."""


_WINDOWS = {"sliding_attention", "sliding_window"}
"""Kinds of layers, and fields, of a window that transformers passes to the attention function."""


@cache
def _samples() -> TokenTable:
    """Two responses to one prompt and one to another, longer than a small copy's windows; their tokens differ."""
    prompt = [3, 4, 5, 6, 7, 8, 9]
    rows = [
        ("p", 0, prompt, [11, 12, 13]),
        ("p", 1, prompt, [15, 16, 17, 18]),
        ("q", 0, [21, 22, 23, 24, 25, 26], [27, 28]),
    ]
    names = ("prompt_uid", "sample_index", "prompt_ids", "response_ids")
    columns: dict[str, Any] = dict(zip(names, zip(*rows, strict=True), strict=True))
    return TokenTable(pa.table(columns | {"loss_mask": [[True] * len(response) for *_, response in rows]}))


@ieee_float32()
def adapt(
    module: ModelModule, model: PreTrainedModel, device: Device, packing: bool, sequence: SequenceGroup | None = None
) -> bool:
    """Make the model as fast as its results allow, and return whether it packs (`packed_attention`); another one
    gets no mask of the padding if its results do not depend on it. Workers of `sequence` share each micro-batch;
    collective over them. Raises ValueError if they cannot, as the model does not pack or depends on other tokens
    elsewhere."""
    if packing and takes_segments(model, device):
        if sequence is not None:
            _share_rows(module, model, device, sequence)
        return True
    if sequence is not None:
        raise ValueError(
            f"{type(model).__name__} takes no packed rows: its attention is limited to chunks, caps logits, "
            "has sinks, or is of another kind; set sequence_parallel_size: 1"
        )
    module.masks_padding = not _ignores_padding(model, device)
    return False


@ieee_float32()
def takes_segments(model: PreTrainedModel, device: Device) -> bool:
    """Whether the model isolates the segments of packed rows, tested by running it (with sliding windows, a small
    copy); if so, it is prepared for them. False for attention within chunks or other limits."""
    limits = _attention_limits(model)
    if limits - _WINDOWS:
        return False
    if device == "cuda" and not use_fastest_kernel(_head_size(model), model.dtype, bool(limits)):
        return False
    tried = proxy_for(model, bool(limits) or _amplifies_rounding(model, device), device)
    if tried is None or (tried is model and limits) or not install(tried):
        return False
    if not _isolates(tried):
        uninstall(tried)
        return False
    return tried is model or install(model)


def _share_rows(module: ModelModule, model: PreTrainedModel, device: Device, sequence: SequenceGroup) -> None:
    """Divide packed rows among the workers of a group, tested by running a model, unless it amplifies rounding."""
    sequence_parallel.install(model, sequence)
    module.sequence = sequence
    if model.device.type != device or any(map(is_partitioned, model.parameters())):
        return
    apart, row = (batch.to(model.device) for batch in (_samples().batch(range(3)), _samples().packed_batch(range(3))))
    expected = _states(model, apart, apart.attention_mask)
    with evaluating(module), torch.no_grad():
        own, states = module.states(row)
        at = own.find(row.positions)
        found = at.gather(states[at.local])
    if not _near(model, found, expected) and not _amplifies_rounding(model, device):
        raise ValueError(
            f"{type(model).__name__} computes other states where a row is divided among {sequence.size} workers; set "
            "sequence_parallel_size: 1"
        )


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _isolates(model: PreTrainedModel) -> bool:
    """Whether packed sequences have the states that they have apart. An embedding that is not seen has gradient 0."""
    samples = _samples()
    apart, row = (batch.to(model.device) for batch in (samples.batch(range(3)), samples.packed_batch(range(3), True)))
    try:
        expected = _states(model, apart, apart.attention_mask)
        with _embedded(model) as embedded, torch.enable_grad():
            found = _states(model, row, row.attention_mask)
        for number in range(3):
            (gradient,) = torch.autograd.grad(found[row.sequence == number].sum(), embedded, retain_graph=True)
            own = torch.isin(row.input_ids, apart.input_ids[number])
            if bool(gradient[~own].any()):
                return False
    except Exception as error:  # a model may refuse the positions or the mask in any way
        logger.info("%s takes one sequence to a row: %s", type(model).__name__, error)
        return False
    return _near(model, found, expected)


def _ignores_padding(model: PreTrainedModel, device: Device) -> bool:
    """Whether padding on the right changes nothing without a mask: the model is causal. Tested by running it."""
    tried = proxy_for(model, _amplifies_rounding(model, device), device)
    if tried is None:
        return False
    batch = _samples().batch(range(3)).to(tried.device)
    try:
        return _near(tried, _states(tried, batch, None), _states(tried, batch, batch.attention_mask))
    except Exception as error:  # a model may need a mask in any way
        logger.info("%s needs a mask of the padding: %s", type(model).__name__, error)
        return False


@ieee_float32()
def computes_the_same(model: PreTrainedModel, change: Callable[[PreTrainedModel], None]) -> bool:
    """Whether `change`, which is made to the model, leaves its states and gradients as they were but for rounding."""
    expected = _states_and_gradients(model)
    change(model)
    found = _states_and_gradients(model)
    return len(found) == len(expected) and all(_near(model, *pair) for pair in zip(found, expected, strict=True))


@torch.enable_grad()
def _states_and_gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    """The states of some tokens, and the gradient of a weighted sum of them for each parameter that it depends on."""
    batch = _samples().batch(range(3)).to(model.device)
    states = _states(model, batch, batch.attention_mask)
    weights = torch.linspace(-1.0, 1.0, states.numel(), device=states.device).view_as(states)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((states.float() * weights).sum(), parameters, allow_unused=True)
    return [states.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _states(model: PreTrainedModel, batch: TokenBatch, mask: torch.Tensor | None) -> torch.Tensor:
    """Last states [T, ...] of the tokens that predict a response, in evaluation mode."""
    arguments = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    with evaluating(model):
        states = model.base_model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False, **arguments)[0]
    return states.flatten(0, 1)[batch.positions]


@torch.no_grad()
def _amplifies_rounding(model: PreTrainedModel, device: Device) -> bool:
    """Whether a trained model's states cannot compare two computations: for rare tokens the last bit of the
    embeddings can change all of a state. False for a model that is tried out as a copy."""
    if model.device.type != device or any(map(is_partitioned, model.parameters())):
        return False
    batch = _samples().batch(range(3)).to(model.device)
    bits = (torch.arange(batch.input_ids.numel(), device=model.device) % 3 - 1).view_as(batch.input_ids)[..., None]

    def change(*call: Any) -> torch.Tensor:
        return call[-1] * (1.0 + bits * torch.finfo(model.dtype).eps).to(model.dtype)

    try:
        expected = _states(model, batch, batch.attention_mask)
        handle = model.get_input_embeddings().register_forward_hook(change)
        try:
            found = _states(model, batch, batch.attention_mask)
        finally:
            handle.remove()
    except Exception as error:  # it is tried out in other ways, and refused there
        logger.info("%s cannot be run: %s", type(model).__name__, error)
        return False
    return not _near(model, found, expected)


def _near(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two ways to compute the same states differ by rounding only."""
    found, expected = found.detach().float(), expected.detach().float()
    return bool((found - expected).norm() <= ROUNDING[model.dtype] * expected.norm())


@contextmanager
def _embedded(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The embeddings of the tokens that the model runs on inside the block, with gradients."""
    found: list[torch.Tensor] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *call: found.append(call[-1].requires_grad_()))
    try:
        yield found
    finally:
        handle.remove()


def _attention_limits(model: PreTrainedModel) -> set[str]:
    """What keeps a token from attending to all earlier ones: kinds of layers, or fields of a window or chunk."""
    config = model.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return {kind for kind in kinds if kind != "full_attention"}
    longest = getattr(config, "max_position_embeddings", None) or float("inf")
    return {
        name
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name) and isinstance(value, int) and 0 < value < longest
    }


@ieee_float32()
def check_deterministic(module: ModelModule, model: PreTrainedModel, device: Device) -> None:
    """Refuse a model that computes something else in training than in evaluation, or every time: the ratio of new to
    old policy must be 1 before an update. Tested in the mode it is in: only layers that recompute their
    activations train. Raises ValueError with the configuration fields that make it random."""
    tried = proxy_for(model, device=device)
    if tried is None:
        return
    if tried is not model:
        module = _trained_as(model, tried)
    noise, kind = _noise(module, tried), type(model).__name__
    if noise:
        fields = " and ".join(_noisy_fields(module, tried))
        remedy = f"set {fields} to 0 in its config.json" if fields else "no field of its config.json explains it"
        raise ValueError(
            f"{kind} is not deterministic in training mode: the states of the same tokens differ by up to {noise:.2g}; "
            f"{remedy}, or train without gradient_checkpointing"
        )


def _trained_as(model: PreTrainedModel, tried: PreTrainedModel) -> ModelModule:
    """A module in training mode around a copy of `model`, whose layers are in the same modes."""
    if model.is_gradient_checkpointing:
        tried.gradient_checkpointing_enable()
    module = ModelModule()
    module.model = tried
    return module.train()


@torch.no_grad()
def _noise(module: ModelModule, model: PreTrainedModel) -> float:
    """Largest difference of the states of two passes in the module's mode, or to evaluation mode; 0 for rounding."""
    ids = (7 * torch.arange(16, device=model.device) % model.config.get_text_config().vocab_size)[None]

    def states() -> torch.Tensor:
        return model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0].float()

    def largest(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().max())

    trained, again = states(), states()
    noise = largest(trained, again)
    with evaluating(module):
        evaluated = states()
        floor = largest(states(), states()) if noise else 0.0
    rounding, gap = _TOLERANCE[model.dtype] * float(evaluated.abs().max()), largest(trained, evaluated)
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


def use_liger(model: PreTrainedModel, device: Device) -> None:
    """Replace layers of a loaded model by Liger's, before DeepSpeed gets it; the head stays
    (`modeling.CausalLogprobs`). Liger also replaces the rotary positions of every model of this architecture in
    the process. Raises ValueError if it is not installed, does not support the model, or computes something else."""
    try:
        liger: Any = import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ValueError(f"kernels: liger needs the package liger-kernel: {error}") from error
    kind, known = model.config.model_type, sorted(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)
    if kind not in known:
        raise ValueError(f"kernels: liger does not support models of type {kind}; supported: {', '.join(known)}")

    def replace(target: PreTrainedModel) -> None:
        liger._apply_liger_kernel_to_instance(target, fused_linear_cross_entropy=False, cross_entropy=False)

    tried = proxy_for(model, small=True, device=device)
    if tried is None or tried is model:
        raise ValueError(f"{type(model).__name__} could not be tried on Liger's kernels; set kernels: torch")
    if not computes_the_same(tried, replace):
        raise ValueError(f"{type(model).__name__} computes something else with Liger's kernels; set kernels: torch")
    replace(model)

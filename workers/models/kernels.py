"""Liger's Triton kernels (arXiv 2410.10989) instead of a model's own layers: norms, rotary positions, gated MLPs.

They need a GPU. Before a model trains with them, the states and gradients of a small copy of it are compared with and
without them on the device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.config import Device
from troupe.workers.models.capabilities import computes_the_same
from troupe.workers.models.partitioned import runnable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_liger(model: PreTrainedModel, device: Device) -> None:
    """Replace layers of a loaded model by Liger's. Call it before DeepSpeed gets the model.

    The head stays as it is: log-probs and entropy are computed by `modeling.CausalLogprobs`. Liger also replaces the
    rotary positions of every other model of this architecture in the process.

    Args:
        model: The model.
        device: Where it will run.

    Raises:
        ValueError: Liger is not installed, does not support the model, or computes something else than the model.
    """
    try:
        liger: Any = import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ValueError(f"kernels: liger needs the package liger-kernel: {error}") from error
    kind, known = model.config.model_type, sorted(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)
    if kind not in known:
        raise ValueError(f"kernels: liger does not support models of type {kind}; supported: {', '.join(known)}")

    def replace(target: PreTrainedModel) -> None:
        liger._apply_liger_kernel_to_instance(target, fused_linear_cross_entropy=False, cross_entropy=False)

    tried = runnable(model, small=True, device=device)
    if tried is None or tried is model:
        raise ValueError(f"{type(model).__name__} could not be tried on Liger's kernels; set kernels: torch")
    if not computes_the_same(tried, replace):
        raise ValueError(f"{type(model).__name__} computes something else with Liger's kernels; set kernels: torch")
    replace(model)

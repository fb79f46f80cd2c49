"""Liger's kernels are used only where they compute what the model does. The kernels themselves need a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.workers.models.test_modeling import SIZES
from troupe.workers.models.capabilities import use_liger

LIGER = "liger_kernel.transformers.monkey_patch"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def installed(patch: pytest.MonkeyPatch, apply: Callable[..., None]) -> None:
    """A package of Liger whose kernels are those of `apply`."""
    module = ModuleType(LIGER)
    vars(module).update(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None}, _apply_liger_kernel_to_instance=apply)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, LIGER, module)


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden_states, weight.shape, weight, epsilon)


def norms_with(epsilon: float) -> Callable[..., None]:
    """Replaces the norms by torch's, with this epsilon."""

    def apply(model: LlamaForCausalLM, **options: bool) -> None:
        assert options == {"fused_linear_cross_entropy": False, "cross_entropy": False}
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                vars(module)["forward"] = partial(rms_norm, weight=module.weight, epsilon=epsilon)

    return apply


def replaced(model: LlamaForCausalLM) -> bool:
    return all("forward" in vars(module) for module in model.modules() if isinstance(module, LlamaRMSNorm))


def test_kernels_that_compute_the_same_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, norms_with(1e-6))
    model = llama()
    use_liger(model, "cpu")
    assert replaced(model)


def test_kernels_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, norms_with(0.5))
    with pytest.raises(ValueError, match="LlamaForCausalLM computes something else with Liger's kernels; set kernels"):
        use_liger(llama(), "cpu")


def test_kernels_with_a_wrong_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(model: LlamaForCausalLM, **_: bool) -> None:
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                own = module.forward
                vars(module)["forward"] = lambda hidden_states, own=own: own(hidden_states).detach() + 0 * hidden_states

    installed(monkeypatch, apply)
    with pytest.raises(ValueError, match="computes something else with Liger's kernels"):
        use_liger(llama(), "cpu")


def test_unknown_models_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, norms_with(1e-6))
    model = llama()
    monkeypatch.setattr(LlamaConfig, "model_type", "mamba")
    with pytest.raises(ValueError, match="does not support models of type mamba; supported: llama"):
        use_liger(model, "cpu")
    monkeypatch.setitem(sys.modules, LIGER, None)
    with pytest.raises(ValueError, match="needs the package liger-kernel"):
        use_liger(model, "cpu")


def test_the_real_package_replaces_what_it_says() -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is installed with the extra gpu")
    liger: Any = import_module(LIGER)
    model = llama()
    liger._apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
    assert replaced(model)

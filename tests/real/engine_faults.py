"""Faults inside an engine's process, for the tests of the audit. vLLM imports this module there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from vllm.v1.worker.cpu_worker import CPUWorker

from troupe.workers.weights import reload
from troupe.workers.weights.reload import ModelReload
from troupe.workers.weights.vllm_transfer import EngineExtension

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}


class FaultyExtension(EngineExtension):
    """Plants faults in the process that holds the engine's model."""

    model_runner: Any

    def plant(self, fault: str, about: str) -> None:
        """Plants a fault."""
        _ENGINE_FAULTS[fault](self.model_runner, about)

    def cure(self) -> None:
        """Removes every fault."""
        while _CURES:
            _CURES.pop()()


_CURES: list[Callable[[], None]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    old = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, value)
    _CURES.append(lambda: setattr(owner, name, old) if own else delattr(owner, name))


def _stale_head(runner: Any, about: str) -> None:
    _replace(reload, "_repack_heads", lambda model: None)


def _left_out(runner: Any, about: str) -> None:
    """Updates from now on lack the weights whose names contain `about`, and nothing notices."""
    load = ModelReload.load

    def without(self: ModelReload, tensors: Any) -> None:
        load(self, ((name, tensor) for name, tensor in tensors if about not in name))

    _replace(ModelReload, "load", without)
    _replace(reload, "_missing_layers", lambda model, tied: [])


def _no_update(runner: Any, about: str) -> None:
    _replace(ModelReload, "load", lambda self, tensors: None)
    _replace(reload, "_missing_layers", lambda model, tied: [])


def _rounded(runner: Any, about: str) -> None:
    """Updates from now on are rounded to the type `about`."""
    load = ModelReload.load

    def rounded(self: ModelReload, tensors: Any) -> None:
        load(self, ((name, tensor.to(DTYPES[about]).to(tensor.dtype)) for name, tensor in tensors))

    _replace(ModelReload, "load", rounded)


def _refused_by_a_rank(runner: Any, about: str) -> None:
    """The next part of an update is refused by this rank of the engine alone."""
    if runner.parallel_config.rank != int(about):
        return
    load = ModelReload.load

    def refuse(self: ModelReload, tensors: Any) -> None:
        ModelReload.load = load
        raise RuntimeError(f"refused by rank {about}")

    ModelReload.load = refuse


def _hook_positions(runner: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def changed(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"positions": change(kwargs["positions"])}

    for layer in runner.model.model.layers:
        _CURES.append(layer.self_attn.register_forward_pre_hook(changed, with_kwargs=True).remove)


def _positions(runner: Any, about: str) -> None:
    """Tokens from position `about` on are one position late."""
    start = int(about)
    _hook_positions(runner, lambda positions: positions + (positions >= start))


def _head(runner: Any, about: str) -> None:
    """The output head computes in the type `about`; the tiny model's head is its embedding."""
    dtype, weight = DTYPES[about], runner.model.model.embed_tokens.weight

    def short(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return functional.linear(states.to(dtype), weight.to(dtype)).float()

    _replace(runner.model, "compute_logits", short)


def _rope_scaling(runner: Any, about: str) -> None:
    """Angles are twice what they should be, as where a linear scaling by 2 is ignored."""
    _hook_positions(runner, lambda positions: 2 * positions)


def _rope_theta(runner: Any, about: str) -> None:
    """The angles' base is `about`. All layers share one cache of them."""
    rotary = runner.model.model.layers[0].self_attn.rotary_emb
    own = rotary.cos_sin_cache.clone()
    _CURES.append(lambda: rotary.cos_sin_cache.copy_(own))
    _replace(rotary, "base", float(about))
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())


def _epsilon(runner: Any, about: str) -> None:
    for module in runner.model.modules():
        if "variance_epsilon" in vars(module):
            _replace(module, "variance_epsilon", float(about))


def _final_norm(runner: Any, about: str) -> None:
    """The last norm only adds the residual."""
    _replace(runner.model.model.norm, "forward", lambda states, residual: (states + residual, residual))


def _attention_scale(runner: Any, about: str) -> None:
    for layer in runner.model.model.layers:
        attention = layer.self_attn.attn.impl
        _replace(attention, "scale", 0.25 * attention.scale)


def _skipped_mlp(runner: Any, about: str) -> None:
    mlp = runner.model.model.layers[1].mlp
    _CURES.append(mlp.register_forward_hook(lambda module, args, output: torch.zeros_like(output)).remove)


def _logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, str], None]:
    def plant(runner: Any, about: str) -> None:
        compute = runner.model.compute_logits
        _replace(runner.model, "compute_logits", lambda *args, **kwargs: change(compute(*args, **kwargs)))

    return plant


def _biased(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(1))


def _raw_logprobs(runner: Any, about: str) -> None:
    for sampler in (runner.sampler, runner.sampler.topk_topp_sampler):
        _replace(sampler, "logprobs_mode", "raw_logprobs")


def _sleep_of_gpus(runner: Any, about: str) -> None:
    """Level 2 first copies every buffer to host memory, as in vLLM's worker for GPUs; the one for CPUs does nothing."""

    def sleep(self: CPUWorker, level: int = 1) -> None:
        if level == 2:
            for _, buffer in self.model_runner.model.named_buffers():
                buffer.cpu().clone()

    _replace(CPUWorker, "sleep", sleep)


_ENGINE_FAULTS: dict[str, Callable[[Any, str], None]] = {
    "stale head": _stale_head,
    "left out": _left_out,
    "no update": _no_update,
    "rounded": _rounded,
    "positions": _positions,
    "head": _head,
    "raw logprobs": _raw_logprobs,
    "rope scaling": _rope_scaling,
    "rope theta": _rope_theta,
    "epsilon": _epsilon,
    "final norm": _final_norm,
    "attention scale": _attention_scale,
    "skipped mlp": _skipped_mlp,
    "shifted head": _logits(lambda logits: logits.roll(1, -1)),
    "capped logits": _logits(lambda logits: torch.tanh(logits)),
    "biased logits": _logits(_biased),
    "sleep of GPUs": _sleep_of_gpus,
    "refused by a rank": _refused_by_a_rank,
}

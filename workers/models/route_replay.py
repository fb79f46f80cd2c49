"""Routing replay (R3, arXiv 2510.11370): the trainer runs each token through the experts that the engine chose for it.

Where two experts are nearly as likely, rounding decides between them, and the trainer's log-probs differ from the
sampler's by what other experts compute. Only the choice is replayed: the weights of the chosen experts, and their
gradients, are the trainer's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOPK = (torch.topk, torch.Tensor.topk)


class RouteReplay:
    """Replaces what a model's routers choose by what the micro-batch says that they chose.

    The routes stay set until the next forward pass: layers that recompute their activations choose again in the
    backward pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap the routers of the layers. Raises ValueError if there are none."""
        self._routes: torch.Tensor | None = None
        config = model.config.get_text_config()
        self._layers: int = config.num_hidden_layers
        self._experts: int = next((value for name in _EXPERTS if (value := getattr(config, name, None))), 0)
        routers = [
            (int(layer[1]), module)
            for name, module in model.named_modules()
            if (layer := _LAYER.search(name)) is not None and type(module).__name__.endswith("Router")
        ]
        if not routers or not self._experts:
            raise ValueError(f"sampling.router_replay: {type(model).__name__} has no routers of experts that are known")
        for layer, module in routers:
            module.forward = partial(self._forward, module, module.forward, layer)

    def set(self, routes: torch.Tensor | None) -> None:
        """Let the next forward pass choose as `routes`, integers [rows, tokens, layers, k], say; -1, and None for all
        tokens, stand for the router's own choice. Raises ValueError if they are of another number of layers."""
        if routes is not None and routes.shape[2] != self._layers:
            raise ValueError(f"the batch has routes of {routes.shape[2]} layers, and the model has {self._layers}")
        self._routes = None if routes is None else routes.flatten(0, 1)

    def _forward(self, module: nn.Module, forward: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
        if self._routes is None:
            return forward(*args, **kwargs)
        with _Choice(self._routes[:, layer].long(), self._experts) as choice:
            result = forward(*args, **kwargs)
        if not choice.made:
            raise ValueError(f"sampling.router_replay: the choice of {type(module).__name__} cannot be replayed")
        return result


class _Choice(TorchFunctionMode):
    """Makes a `topk` that chooses experts for these tokens return the given ones, with their own values."""

    def __init__(self, chosen: torch.Tensor, experts: int) -> None:
        """`chosen`: int64 [tokens, k], or -1; `experts`: number of all experts."""
        super().__init__()
        self._chosen = chosen
        self._experts = experts
        self.made = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        values: torch.Tensor = args[0] if args else (kwargs or {})["input"]
        # Some routers choose groups of experts before.
        if values.shape[-1] != self._experts or result.indices.numel() != self._chosen.numel():
            return result
        self.made = True
        chosen = self._chosen.view_as(result.indices)
        indices = torch.where(chosen >= 0, chosen, result.indices)
        return type(result)((values.gather(-1, indices), indices))

"""Turns dropout off in all models: the log-probs of an update must equal the sampler's."""

from __future__ import annotations

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout of a model to 0, for layers that stay in training mode. Its configuration is not changed."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)

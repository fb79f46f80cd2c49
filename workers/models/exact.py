"""What makes two ways to compute the same comparable: no dropout, and products of float32 in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout of a model to 0, for layers that stay in training mode. Its configuration is not changed."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Compute products of float32 matrices in float32 inside the block. TF32 (10 bits of mantissa: correct results
    differ by 4e-4) is the default if TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is 1, as in NVIDIA's containers. torch
    refuses a product if its old setting (`set_float32_matmul_precision`) contradicts the new (`fp32_precision`),
    and to read the old one then: both are set and restored."""
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    settings = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, setting in zip(backends, settings, strict=True):
            backend.fp32_precision = setting

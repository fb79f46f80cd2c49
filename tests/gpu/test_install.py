"""The installation: `troupe doctor`, kernels in float32 and bfloat16, the import of vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.isolated import Measurements, finish, isolated
from tests.real.commands import Command, troupe_command

_SIZE = 2048
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 2e-2}
"""Highest accepted relative error. float32 products may use TF32 on a GPU."""


@pytest.mark.gpu
def test_the_installation_computes(tmp_path: Path, measured: Callable[[Measurements], None]) -> None:
    finish(Command(tmp_path, troupe_command("doctor")))
    measured(isolated(tmp_path, measure))


def measure() -> Measurements:
    """Multiply matrices and import vLLM."""
    assert torch.cuda.is_available(), f"torch {torch.__version__} finds no GPU (CUDA {torch.version.cuda or 'none'})"
    major, minor = torch.cuda.get_device_capability()
    found: dict[str, float | str] = {
        "GPU": torch.cuda.get_device_name(),
        "compute capability": f"{major}.{minor}",
        "torch CUDA": torch.version.cuda or "none",
    }
    assert torch.cuda.is_bf16_supported(including_emulation=False), f"{found}: no bfloat16"
    found |= errors_of_products("cuda")
    began = time.monotonic()
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    return found | {AsyncLLM.__name__: vllm.__version__, "import, s": time.monotonic() - began}


def test_products_are_right_on_the_cpu() -> None:
    assert len(errors_of_products("cpu")) == len(_TOLERANCE)


def errors_of_products(device: str) -> Measurements:
    """Relative error of a matrix product in each type."""
    errors = {dtype: relative_error(dtype, device) for dtype in _TOLERANCE}
    assert all(error <= _TOLERANCE[dtype] for dtype, error in errors.items()), errors
    return {f"relative error, {str(dtype).removeprefix('torch.')}": error for dtype, error in errors.items()}


def relative_error(dtype: torch.dtype, device: str) -> float:
    """Relative error (Frobenius norm) of a matrix product on the device, against float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE // 8, _SIZE, generator=generator).to(dtype) for _ in range(2))
    exact = left.double() @ right.double().T
    found = (left.to(device) @ right.to(device).T).cpu().double()
    return float((found - exact).norm() / exact.norm())

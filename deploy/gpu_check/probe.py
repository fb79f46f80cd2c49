"""The installation piece of the GPU check: kernels in float32 and bfloat16 give right results, and vLLM imports."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from deploy.gpu_check.outcome import NotRight, write_measurements

_SIZE = 2048
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 2e-2}
"""Highest accepted relative error. float32 products may use TF32 on a GPU."""


def relative_error(dtype: torch.dtype, device: str) -> float:
    """Relative error (Frobenius norm) of a matrix product on the device, against float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE // 8, _SIZE, generator=generator).to(dtype) for _ in range(2))
    exact = left.double() @ right.double().T
    found = (left.to(device) @ right.to(device).T).cpu().double()
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    """Run the checks and write their measurements; exits with code 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_check.probe", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="file for the measurements")
    given = parser.parse_args()
    write_measurements(given.json, lambda: measure(given.device))


def measure(device: str) -> dict[str, float | str]:
    """Run the checks; returns the measurements. Raises NotRight."""
    measurements: dict[str, float | str] = {"torch CUDA": torch.version.cuda or "none"}
    if device == "cuda":
        if not torch.cuda.is_available():
            raise NotRight(f"torch {torch.__version__} sees no GPU (built for CUDA {torch.version.cuda or 'none'})")
        major, minor = torch.cuda.get_device_capability()
        measurements |= {"GPU": torch.cuda.get_device_name(), "compute capability": f"{major}.{minor}"}
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise NotRight(f"{measurements['GPU']} (compute capability {major}.{minor}) has no bfloat16")
    for dtype, tolerance in _TOLERANCE.items():
        error = relative_error(dtype, device)
        if not error <= tolerance:
            raise NotRight(f"a matrix product in {dtype} has a relative error of {error:.2e}, more than {tolerance:g}")
        measurements[f"relative error, {str(dtype).removeprefix('torch.')}"] = error
    began = time.monotonic()
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    measurements |= {AsyncLLM.__name__: vllm.__version__, "import, s": time.monotonic() - began}
    return measurements


if __name__ == "__main__":
    main()

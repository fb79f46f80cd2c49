"""What NVIDIA's data sheets promise of a GPU: the peaks that a run's speed is compared with and predicted from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuPeaks:
    """Peaks of one type of GPU."""

    flops: float
    """Floating-point operations per second of dense bfloat16 products (float16 where a GPU has no bfloat16)."""
    bandwidth: float
    """Bytes per second from and to its memory."""
    link: float
    """Bytes per second to the other GPUs of its node, in one direction."""


_PEAKS = {
    "A100-40G": GpuPeaks(312e12, 1555e9, 300e9),
    "A100": GpuPeaks(312e12, 2039e9, 300e9),
    "A800": GpuPeaks(312e12, 2039e9, 200e9),
    "A10": GpuPeaks(125e12, 600e9, 32e9),
    "H100NVL": GpuPeaks(835e12, 3900e9, 300e9),
    "H100PCIE": GpuPeaks(756e12, 2000e9, 64e9),
    "GH200": GpuPeaks(989e12, 4000e9, 450e9),
    "H100": GpuPeaks(989e12, 3350e9, 450e9),
    "H800": GpuPeaks(989e12, 3350e9, 200e9),
    "H200": GpuPeaks(989e12, 4800e9, 450e9),
    "H20": GpuPeaks(148e12, 4000e9, 450e9),
    "B200": GpuPeaks(2250e12, 8000e9, 900e9),
    "L40S": GpuPeaks(362e12, 864e9, 32e9),
    "L40": GpuPeaks(181e12, 864e9, 32e9),
    "L4": GpuPeaks(121e12, 300e9, 32e9),
    "A6000": GpuPeaks(155e12, 768e9, 32e9),
    "RTX3090": GpuPeaks(71e12, 936e9, 32e9),
    "RTX4090": GpuPeaks(165e12, 1008e9, 32e9),
    "RTX5090": GpuPeaks(209e12, 1792e9, 64e9),
    "V100": GpuPeaks(125e12, 900e9, 150e9),
    "T4": GpuPeaks(65e12, 320e9, 16e9),
}
"""By a part of the GPU's name without spaces, in capitals; the first entry that fits counts."""


def gpu_peaks(name: str) -> GpuPeaks | None:
    """The peaks of the GPU with this name, nvidia-smi's or Ray's, or None if unknown."""
    words = name.replace(" ", "").upper()
    return next((peaks for part, peaks in _PEAKS.items() if part in words), None)

"""Types of GPUs (`roles.*.accelerator`) as labels of Kubernetes nodes.

Ray and Kubernetes name GPUs differently, and every distributor of Kubernetes has a separate label: NVIDIA's GPU
feature discovery, GKE, and Karpenter on AWS. A node with any of them matches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Names:
    """Values of the labels for one type."""

    product: tuple[str, ...]
    gke: tuple[str, ...] = ()
    karpenter: tuple[str, ...] = ()


_A100_40 = ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB")
_A100_80 = ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe")
_V100 = tuple(f"Tesla-V100-{form}-{size}GB" for form in ("SXM2", "PCIE") for size in (16, 32))
_TYPES = {
    "T4": _Names(("Tesla-T4",), ("nvidia-tesla-t4",), ("t4",)),
    "L4": _Names(("NVIDIA-L4",), ("nvidia-l4",), ("l4",)),
    "A10": _Names(("NVIDIA-A10",)),
    "A10G": _Names(("NVIDIA-A10G",), (), ("a10g",)),
    "RTX4090": _Names(("NVIDIA-GeForce-RTX-4090",)),
    "V100": _Names((*_V100, "Tesla-V100-SXM3-32GB"), ("nvidia-tesla-v100",), ("v100",)),
    "A100-40G": _Names(_A100_40, ("nvidia-tesla-a100",)),
    "A100-80G": _Names(_A100_80, ("nvidia-a100-80gb",)),
    "A100": _Names((*_A100_40, *_A100_80), ("nvidia-tesla-a100", "nvidia-a100-80gb"), ("a100",)),
    "L40S": _Names(("NVIDIA-L40S",), (), ("l40s",)),
    "H100": _Names(
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
        ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
        ("h100",),
    ),
    "H200": _Names(("NVIDIA-H200", "NVIDIA-H200-NVL"), ("nvidia-h200-141gb",), ("h200",)),
    "B200": _Names(("NVIDIA-B200",), ("nvidia-b200",), ("b200",)),
}
"""Names of types of GPUs by Ray's name. The products are the names that nvidia-smi reports, with `-` for spaces."""


def node_affinity(accelerator: str) -> dict[str, Any] | None:
    """The affinity of a pod to nodes with GPUs of this type, or None if no label of such nodes is known."""
    names = _TYPES.get(accelerator)
    if names is None:
        return None
    labels = {
        "nvidia.com/gpu.product": names.product,
        "cloud.google.com/gke-accelerator": names.gke,
        "karpenter.k8s.aws/instance-gpu-name": names.karpenter,
    }
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]}
        for key, values in labels.items()
        if values
    ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}

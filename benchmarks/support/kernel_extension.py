"""Reloading weights in vLLM's worker for the bare loop with the product's kernels, which vLLM gets with this module."""

from __future__ import annotations

from benchmarks.support.bare_loop_extension import ReloadExtension
from troupe.workers.weights.cpu_kernels import logits_in_blocks


class KernelExtension(ReloadExtension):
    """As its base, beside the product's output head."""


logits_in_blocks()

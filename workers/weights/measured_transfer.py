"""vLLM worker extension that times the parts of a weight update, for benchmarks. vLLM imports it in its worker process.

It measures the extension of a run, whose functions it wraps.
"""

from __future__ import annotations

from troupe.workers.telemetry.timing import Parts
from troupe.workers.weights import vllm_transfer
from troupe.workers.weights.file import MappedWeights
from troupe.workers.weights.reload import ModelReload

PARTS = Parts()
"""`verify` and `load`."""


class MeasuredExtension(vllm_transfer.EngineExtension):
    """Methods that vLLM adds to its worker class."""

    def troupe_update_parts(self) -> dict[str, float]:
        """Seconds by part of the updates since the last call."""
        return PARTS.read()


PARTS.watch(MappedWeights, "verify", "verify")
PARTS.watch(vllm_transfer, "checksums", "verify")
PARTS.watch(vllm_transfer, "weights_digest", "verify")
for method in ("begin", "load", "end"):
    PARTS.watch(ModelReload, method, "load")

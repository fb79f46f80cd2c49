"""What a spec with adapters (`roles.policy.lora`) cannot have, each with the path of the field to change."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.spec.preflight import Finding
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import LoraConfig

_LORA = "roles.policy.lora"


def lora_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings of the adapters that vLLM cannot load, and settings of the run that adapters do not support."""
    lora = spec.roles.policy.lora
    if lora is None:
        return
    yield from _adapters(lora)
    policy, rollout = spec.roles.policy, spec.roles.rollout
    if policy.zero_stage == 3:
        yield "roles.policy.zero_stage", "adapters are not supported with ZeRO-3; use 0, 1 or 2"
    if policy.sequence_parallel_size > 1:
        yield "roles.policy.sequence_parallel_size", "adapters are not supported with workers that share rows; use 1"
    if rollout.tensor_parallel_size > 1:
        yield "roles.rollout.tensor_parallel_size", "adapters are not supported in an engine with several ranks; use 1"
    if rollout.colocate_with is not None:
        yield "roles.rollout.colocate_with", "adapters are not supported in engines on the policy's GPUs; remove it"
    if spec.weight_sync.backend not in ("auto", "shm"):
        yield "weight_sync.backend", f"{spec.weight_sync.backend} sends whole models; adapters use shm (or auto)"
    if algorithms.trust_region(spec.algorithm) is not None:
        yield _LORA, f"is not supported by {spec.algorithm.name}, which shortens steps; train all weights"


def _adapters(lora: LoraConfig) -> Iterator[Finding]:
    if not lora.targets:
        yield f"{_LORA}.targets", "names no layer: nothing would train; remove it for all linear layers"
    if lora.dropout > 0:
        why = "the log-probs of an update would not be those of the policy that sampled"
        yield f"{_LORA}.dropout", f"must be 0: {why}"
    if lora.bias != "none":
        yield f"{_LORA}.bias", "must be none: vLLM loads no biases with an adapter"
    if lora.modules_to_save:
        yield f"{_LORA}.modules_to_save", "must be empty: vLLM loads no whole modules with an adapter"

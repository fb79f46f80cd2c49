"""What a spec with adapters (`roles.policy.lora`, `roles.critic.lora`) cannot have, each with the field to change."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.machine import Finding
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.weight_backends import BACKENDS

_MERGE = "merge it first (troupe export --merge)"


def lora_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings of the adapters, and settings of the run that adapters of the policy do not support."""
    yield from adapter_problems(spec)
    if spec.roles.policy.lora is None:
        return
    if spec.roles.rollout.sleep == "weights":
        why = "weights discards the model below, and an update brings only the adapters; use kv_cache"
        yield "roles.rollout.sleep", why
    if not BACKENDS[spec.resolved_backend()].writes_file:
        files = " or ".join(row.name for row in BACKENDS.values() if row.writes_file)
        yield "weight_sync.backend", f"{spec.weight_sync.backend} sends whole models; adapters use {files} (or auto)"


def adapter_problems(spec: RunSpec) -> Iterator[Finding]:
    """Settings of adapters that trainers, and vLLM, do not support, and given adapters that cannot be loaded."""
    yield from _given_adapters(spec)
    for name, role in spec.roles.trainers().items():
        if role.lora is None:
            continue
        field = f"roles.{name}.lora"
        if not role.lora.targets:
            yield f"{field}.targets", "names no layer: nothing would train; remove it for all linear layers"
        if role.lora.dropout > 0:
            yield f"{field}.dropout", "must be 0: an update must compute what the sampler and an evaluation compute"
        if role.lora.bias != "none":
            yield f"{field}.bias", "must be none: vLLM loads no biases with an adapter"
        if role.lora.modules_to_save:
            yield f"{field}.modules_to_save", "must be empty: vLLM loads no whole modules with an adapter"


def _given_adapters(spec: RunSpec) -> Iterator[Finding]:
    """Adapters of models (`model.adapter`) in roles that cannot take them up."""
    models, policy, reference = spec.models(), spec.roles.policy, spec.roles.reference
    if spec.model.adapter is not None and policy.lora is None:
        yield (
            "model.adapter",
            "needs roles.policy.lora with its rank, alpha and targets, to train on; or merge it first",
        )
    judge = models.get("roles.judge.model")
    if judge is not None and judge.adapter is not None:
        yield "roles.judge.model.adapter", f"is not supported in the engine of a judge; {_MERGE}"
    divided = "an adapter cannot be added to a model that is divided over workers"
    if reference is not None and spec.reference_model.adapter is not None:
        if spec.reference_in_policy and policy.zero_stage == 3:
            yield "roles.policy.zero_stage", f"{divided}, as the reference would be; {_MERGE}"
        elif not spec.reference_in_policy and reference.shards > 1:
            yield "roles.reference.shards", f"{divided}; {_MERGE}"
    for name, role in spec.roles.trainers().items():
        starts_from = models.get(f"roles.{name}.model", spec.model)
        if name != "policy" and starts_from.adapter is not None and role.lora is None and role.zero_stage == 3:
            yield f"roles.{name}.zero_stage", f"{divided}; {_MERGE}"

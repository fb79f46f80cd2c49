"""Pairs of the policy's samples and the reference's that cannot work as a spec describes them."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec.rollout import RolloutSpec


def pair_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Engines of the reference that nothing asks, and settings with which its responses are no partners of samples."""
    name, role, roles = spec.algorithm.name, spec.roles.reference_engine, spec.roles
    path = "roles.reference_engine"
    if not algorithms.advantage(spec.algorithm).compares_reference:
        if role is not None:
            yield path, f"{name} compares no samples with the reference's; remove the role, or use xpo"
        return
    if role is None:
        yield path, f"is required: {name} compares samples with responses of the reference, which it samples"
    elif role.max_model_len < roles.rollout.max_model_len:
        limit = f"roles.rollout.max_model_len, {roles.rollout.max_model_len}"
        yield f"{path}.max_model_len", f"must be at least {limit}: it samples behind the same prompts"
    if role is not None and spec.reference_model.adapter is not None:
        yield "roles.reference.model.adapter", f"is not supported in the engine of {path}; merge it first"
    if roles.environment is not None:
        yield "roles.environment", f"{name} compares two responses to a prompt, and an episode has its own; remove it"
    if spec.kl_coef > 0:
        why = f"is estimated on the policy's samples, but {name} trains on the reference's too, and has DPO's KL"
        yield "algorithm.kl.coef", f"{why} (dpo_beta); set it to 0"
    if spec.sampling.temperature != 1.0:
        why = f"{name} compares log-probs at temperature 1, and samples must come from that distribution"
        yield "sampling.temperature", f"{why}; set it to 1, got {spec.sampling.temperature:g}"
    if spec.sampling.truncates:
        why = f"{name} compares log-probs over the whole vocabulary, and samples must come from that distribution"
        yield "sampling", f"{why}; remove top_p, top_k and min_p"

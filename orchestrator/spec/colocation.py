"""What `roles.rollout.colocate_with: policy` implies, filled in where a spec leaves it open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from troupe.orchestrator.spec.yaml_reader import Document


def shared_gpus(document: Document) -> Document:
    """The document with `workers` and `gpus` of an engine on the policy's GPU.

    There is one engine for each policy worker. `gpus` left out, or a whole GPU, is the GPU that the two share: where
    one of them says how much of it it reserves, the other has the rest, else each has half. How much memory each may
    use is another question (`gpu_memory_utilization`).
    """
    roles = document.data.get("roles") if isinstance(document.data, dict) else None
    rollout, policy = (roles.get("rollout"), roles.get("policy")) if isinstance(roles, dict) else (None, None)
    if not isinstance(rollout, dict) or not isinstance(policy, dict) or rollout.get("colocate_with") != "policy":
        return document
    filled: dict[str, Any] = {"workers": policy.get("workers", 1)} | rollout
    own, others = _fraction(rollout), _fraction(policy)
    if own is not None and others is not None and max(own, others) == 1.0:
        engine = own if own < 1.0 else 1.0 - (others if others < 1.0 else 0.5)
        filled["gpus"], policy = round(engine, 6), policy | {"gpus": round(1.0 - engine, 6)}
    return replace(document, data=document.data | {"roles": roles | {"rollout": filled, "policy": policy}})


def _fraction(role: dict[str, Any]) -> float | None:
    """Part of a GPU that a role reserves, 1 for the whole or for none written; None: something else is written."""
    gpus = role.get("gpus", 1.0)
    valid = isinstance(gpus, int | float) and not isinstance(gpus, bool) and 0 < gpus <= 1
    return float(gpus) if valid else None

"""What to change about a role that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.capacity.spec_memory import Sizes, training_of
from orchestrator.capacity.worker_memory import Training, training
from orchestrator.spec.base import RunSpec

MOST_WORKERS = 64
"""Largest number of workers that a remedy proposes."""


def remedy(spec: RunSpec, role: str, room: int, where: str, sizes: Sizes) -> str:
    """What to change about a role that needs too much memory.

    Args:
        spec: The spec.
        role: The role, or another part of a node's memory.
        room: Bytes of a GPU that one worker may take.
        where: The memory that is full, `gpu` or `host`.
        sizes: Sizes of the models.
    """
    rank = training_of(spec, role, sizes, first=role == "policy") if role in ("policy", "critic") else None
    if rank is not None and where == "gpu":
        found = list(remedies(role, rank, room))
        return ", or ".join(found[:2]) if found else "no setting makes it fit; use larger GPUs or a smaller model"
    if role in ("rollout", "judge"):
        # On a GPU the setting decides what an engine takes; a buffer for new weights is added to that.
        return f"lower roles.{role}.{'gpu_memory_utilization' if where == 'gpu' else 'kv_cache_gib, or its workers'}"
    if rank is not None and rank.gpu:
        return f"place fewer of roles.{role}.workers on a node, or use nodes with more memory"
    if role in ("policy", "critic", "reference", "reward"):
        return f"lower roles.{role}.micro_batch_tokens or roles.{role}.workers, or use a smaller model"
    return "use a smaller model, or smaller steps"


def remedies(role: str, rank: Training, room: int) -> Iterator[str]:
    """Alternative changes of a training role with which a rank fits into `room` bytes of its GPU, smallest first."""

    def fits(workers: int, **changes: Any) -> bool:
        changed = replace(rank, ranks=workers, trainer=rank.trainer.model_copy(update=changes))
        return sum(memory.total for memory in training(role, changed) if memory.where == "gpu") <= room

    trainer = rank.trainer
    cheap: list[dict[str, Any]] = [
        *([{"gradient_checkpointing": True}] if not trainer.gradient_checkpointing else []),
        *([{"zero_stage": 3}] if trainer.zero_stage < 3 and rank.ranks > 1 else []),
    ]
    if len(cheap) == 2:
        cheap.append(cheap[0] | cheap[1])
    found = next((changes for changes in cheap if fits(rank.ranks, **changes)), None)
    if found is not None:
        yield _set(role, found)
    for workers in _doublings(rank.ranks):
        changes = next((c for c in ({}, *cheap, {"zero_stage": 3}) if fits(workers, **c)), None)
        if changes is not None:
            with_stage = f" with {_listed(changes)}" if changes else ""
            yield f"raise roles.{role}.workers to {workers}{with_stage}"
            break
    tokens = _halved(trainer.micro_batch_tokens, rank.longest, lambda n: fits(rank.ranks, micro_batch_tokens=n))
    if tokens:
        yield f"lower roles.{role}.micro_batch_tokens to {tokens}"
    offloaded = {"offload_optimizer": True, "zero_stage": max(1, trainer.zero_stage)}
    if not trainer.offload_optimizer and fits(rank.ranks, **offloaded):
        yield _set(role, {name: value for name, value in offloaded.items() if dict(trainer)[name] != value})


def _set(role: str, changes: Mapping[str, Any]) -> str:
    return " and ".join(f"set roles.{role}.{name}: {_yaml(value)}" for name, value in changes.items())


def _listed(changes: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {_yaml(value)}" for name, value in changes.items())


def _yaml(value: Any) -> str:
    return str(value).lower()


def _doublings(workers: int) -> Iterator[int]:
    while (workers := 2 * workers) <= MOST_WORKERS:
        yield workers


def _halved(tokens: int, least: int, good: Callable[[int], bool]) -> int:
    """The first half, quarter, ... of `tokens` that is good and still holds the longest sequence; 0: none."""
    while (tokens := tokens // 2) >= max(least, 8):
        if good(tokens):
            return tokens
    return 0

"""Memory of workers that share a GPU: the part of each that is held in each period of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from troupe.orchestrator.plan.worker_memory import PERIODS, Part, Period, WorkerMemory
from troupe.workers.contract.config import Sleep
from troupe.workers.contract.units import GIB

HEADROOM = 0.1
"""Share of a GPU or of a node's memory that a plan should leave free: estimates can be wrong by as much."""
GRAPHS = GIB
"""Memory of an engine's CUDA graphs, by reports of vLLM's log. Not measured here. They stay while it sleeps."""

_TRAINER: dict[str, tuple[Period, ...]] = {
    "gradients": ("update",),
    "optimizer": ("update",),
    "average": ("update",),
    "gathered": ("update",),
    "activations": ("update",),
    "logits": ("update",),
    "kept": ("update",),
    "step": ("update",),
    "transfer": ("transfer",),
}
"""Periods of the parts of a trainer that it does not hold always."""
_MOVED = ("optimizer", "average")
"""Parts of a trainer that are in host memory outside of the updates."""
_RESTS: dict[Sleep, dict[str, tuple[Period, ...]]] = {
    "none": {},
    "kv_cache": {"kv cache": ("sampling",), "transfer": ("transfer",)},
    "weights": {
        "kv cache": ("sampling",),
        "activations": ("sampling",),
        "weights": ("sampling", "transfer"),
        "transfer": ("transfer",),
    },
}
"""Periods of the parts of an engine, by what it releases. vLLM keeps freed activations until it discards its
weights."""


def of_trainer(memories: Sequence[WorkerMemory], scoring: Sequence[WorkerMemory]) -> Iterator[WorkerMemory]:
    """Memory of a trainer that hands its GPU over: its optimizer is in host memory outside of the updates.

    Args:
        memories: Its memory as if it had the GPU to itself.
        scoring: Memory of its model when it scores while the engines sample, or empty if it does not.
    """
    for memory in memories:
        if memory.where == "host":
            moved = sum(part.bytes for other in memories for part in other.parts if _is_moved(other, part))
            yield replace(memory, parts=(*memory.parts, Part("moved", moved)))
            continue
        periods = _TRAINER | ({"gathered": ("sampling", "update")} if scoring else {})
        parts = [replace(part, periods=periods.get(part.name, PERIODS)) for part in memory.parts]
        passes = [p.bytes for other in scoring if other.where == "gpu" for p in other.parts if p.phase == "pass"]
        if passes:
            parts.append(Part("scoring", sum(passes), "pass", ("sampling",)))
        yield replace(memory, parts=tuple(parts))


def of_engine(memories: Sequence[WorkerMemory], sleep: Sleep) -> Iterator[WorkerMemory]:
    """Memory of an engine that sleeps while the trainer updates."""
    for memory in memories:
        periods = _RESTS[sleep] if memory.where == "gpu" else {}
        parts = (replace(part, periods=periods.get(part.name, PERIODS)) for part in memory.parts)
        yield replace(memory, parts=tuple(parts))


def engine_shares(
    policy: Sequence[WorkerMemory], bare: Sequence[WorkerMemory], sleep: Sleep, gpu: int, reserved: int
) -> tuple[float, ...]:
    """Shares of its GPU that the policy leaves an engine there: with room to spare, and without.

    Args:
        policy: Memory of the policy's rank.
        bare: Memory of the engine without a cache.
        sleep: What the engine releases while it sleeps.
        gpu: Memory of the GPU in bytes.
        reserved: What the two reserve of it, in bytes.
    """
    held = PERIODS if sleep == "none" else ("sampling",)
    both = [memory for memory in (*policy, *bare) if memory.where == "gpu"]
    taken = max(sum(memory.during(period) for memory in both) for period in held)
    rooms = ((1 - spare) * reserved - taken for spare in (HEADROOM, 0.0))
    return tuple(max(0.0, math.floor(100 * (held_by_engine(bare) + room) / gpu) / 100) for room in rooms)


def held_by_engine(memories: Sequence[WorkerMemory]) -> int:
    """Bytes of its share of a GPU that an engine takes: all but the buffers for new weights."""
    parts = [part for memory in memories if memory.where == "gpu" for part in memory.parts]
    return sum(part.bytes for part in parts if part.name != "transfer")


def _is_moved(memory: WorkerMemory, part: Part) -> bool:
    return memory.where == "gpu" and part.name in _MOVED

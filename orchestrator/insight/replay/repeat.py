"""Repeats the updates of kept steps on trainers, and compares the weights with the run's."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from troupe.orchestrator.training.step_record import RecordedStep
from troupe.orchestrator.training.updates import Updates
from troupe.workers.contract.roles import TableRef

Digests = Mapping[str, str]
"""Digest of the weights, by role."""
Weights = Mapping[str, Mapping[str, str]]
"""Digest of each whole parameter in order, by role."""

_TIMED = frozenset({"tokens_per_s", "mfu"})
"""Metrics of an update that depend on how long it took."""


@dataclass(frozen=True)
class Repeated:
    """A step that was repeated."""

    step: int
    recorded: Digests
    """Digests of the weights after the step, in the run."""
    found: Digests
    """Digests of the weights after the step, in the replay."""
    recorded_updates: tuple[Mapping[str, float], ...]
    updates: tuple[Mapping[str, float], ...]
    seconds: float
    """Time of the updates."""
    weights: Weights = field(default_factory=dict)
    """Empty unless requested."""

    @property
    def equal(self) -> bool:
        """Whether the weights equal the run's."""
        return self.recorded == self.found

    def line(self) -> str:
        """The result in one line."""
        result = "equal" if self.equal else "NOT EQUAL"
        parts = ", ".join(_compared(role, digest, self.found.get(role, "")) for role, digest in self.recorded.items())
        return f"step {self.step}: {result} ({parts}; {self.seconds:.2f} s)"

    def different_metrics(self) -> list[str]:
        """Metrics of the updates that differ, of the first update with any: `policy/loss 0.1 in the run, 0.2 here`."""
        return different_metrics(self.recorded_updates, self.updates, "in the run")


def different_metrics(
    there: Sequence[Mapping[str, float]], here: Sequence[Mapping[str, float]], where: str
) -> list[str]:
    """Metrics of the first update that differ between two repetitions of a step, as text; speeds excluded."""
    for number, (first, second) in enumerate(zip(there, here, strict=False), start=1):
        compared = [name for name in first if name.rpartition("/")[2] not in _TIMED]
        names = [name for name in compared if not _same(first[name], second.get(name, math.nan))]
        if names:
            of = f"update {number} of {len(there)}: " if len(there) > 1 else ""
            return [f"{of}{name} is {first[name]:.9g} {where}, {second.get(name, math.nan):.9g} here" for name in names]
    return []


class Replayer:
    """Trainers that repeat kept steps."""

    def __init__(self, updates: Updates, put: Callable[[pa.Table], TableRef], timeout_s: float) -> None:
        """Repeats nothing yet.

        Args:
            updates: The updates and the trainers, whose weights are those before the first step.
            put: Places a table in the object store.
            timeout_s: Bound on a call.
        """
        self._updates = updates
        self._put = put
        self._timeout_s = timeout_s

    async def digests(self) -> dict[str, str]:
        """Digests of the weights now."""
        groups = self._updates.trainers
        found = await asyncio.gather(*(group.digest(timeout_s=self._timeout_s) for group in groups))
        return {group.role: digest for group, digest in zip(groups, found, strict=True)}

    async def repeat(self, folder: RecordedStep, whole: bool = False) -> Repeated:
        """Repeats the updates of a step.

        Args:
            folder: The step.
            whole: Whether the digest of each parameter is taken too; this gathers what ZeRO has partitioned.

        Raises:
            UsageError: A table of the step is not what the run wrote.
            TrainingDiverged: A loss is not finite.
            WorkerError: A call failed.
        """
        kept = folder.kept
        tables = await asyncio.to_thread(folder.tables)
        texts = None if tables.texts is None else self._put(tables.texts)
        batch = folder.batch(self._put(tables.batch), texts)
        started = time.monotonic()
        updates, _ = await self._updates.run(kept.step - 1, batch, kept.state)
        seconds = time.monotonic() - started
        found = await self.digests()
        weights = await self._weights() if whole else {}
        return Repeated(kept.step, kept.after, found, kept.updates, tuple(updates), seconds, weights)

    async def _weights(self) -> dict[str, dict[str, str]]:
        timeout_s = self._timeout_s
        return {group.role: await group.weight_digests(timeout_s=timeout_s) for group in self._updates.trainers}


def start_problem(recorded: Digests, found: Digests, origin: str) -> str:
    """Why the weights that a replay starts from are not the run's; empty if they are, or if it is unknown."""
    wrong = [role for role, digest in recorded.items() if found.get(role) != digest]
    if not wrong:
        return ""
    return f"the {' and '.join(wrong)} of {origin} differ from the weights that the run had there: nothing can be equal"


def software_changes(recorded: Sequence[str], now: Sequence[str]) -> list[str]:
    """Versions and processors that differ: `torch 2.13.0 in the run, torch 2.14.0 here`."""
    here = {line.partition(" ")[0]: line for line in now}
    changes = [(line, here.get(line.partition(" ")[0], "nothing")) for line in recorded]
    return [f"{before} in the run, {after} here" for before, after in changes if before != after]


def _compared(role: str, recorded: str, found: str) -> str:
    """Both digests of a role, shortened; one if they are equal."""
    return f"{role} {recorded[:12]}" + ("" if recorded == found else f" in the run, {found[:12]} here")


def _same(first: Any, second: Any) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))

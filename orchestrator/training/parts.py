"""The interface of a part of a run: a feature that follows the steps, and whose state is in the checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.orchestrator.telemetry.metrics import PhaseTimers
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.state import PenaltyState

Metrics = dict[str, float]

logger = logging.getLogger(__name__)

FORMAT = 2
"""Format of the controller's state in a checkpoint."""


@dataclass(frozen=True)
class UpdatedStep:
    """A step whose updates are made."""

    number: int
    """Counted from 1."""
    batch: Batch
    before: PenaltyState
    """The penalty before the updates."""
    updates: Sequence[Metrics]
    """Metrics of each update."""
    timers: PhaseTimers


@dataclass(frozen=True)
class Moment:
    """A run between two steps."""

    step: int
    """Steps done."""
    timers: PhaseTimers
    """Of the next step."""
    states: Callable[[], Mapping[str, Any]]
    """Returns the states of the parts, by name."""


class RunPart:
    """A feature of a run. Every method does nothing unless a subclass overrides it."""

    name = ""
    """Key of its state in checkpoints, or empty if it has none."""
    state: Any = None
    """A frozen model; every change is a new one."""

    def restore(self, state: Any) -> None:
        """Takes over the state of the checkpoint that the run resumes from. Raises ValueError: it has another form."""
        self.state = type(self.state).model_validate(state)

    async def open(self) -> None:
        """Begins before anything is sampled for training or evaluated. Raises TroupeError."""

    def begin(self, done: int) -> None:
        """Begins with the step after `done`."""

    async def before_update(self) -> None:
        """Waits until the weights may change."""

    async def after_update(self, step: UpdatedStep) -> None:
        """Begins what follows a step's updates, once its weights are on their way and before its samples count."""

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """Follows a step whose samples count; returns its own metrics. `metrics` are the earlier parts'."""
        return {}

    async def end_step(self, now: Moment) -> None:
        """Writes what is due after a step, once its metrics are written."""

    def snapshot(self) -> Any:
        """Its state between two steps, ready for JSON."""
        return self.state.model_dump(mode="json")

    async def close(self) -> None:
        """Ends what it does in the background."""


def restore_parts(parts: Sequence[RunPart], state: Mapping[str, Any]) -> None:
    """Makes the parts take over a checkpoint's state; parts without one start anew. Raises ValueError."""
    states = states_of(state)
    for part in parts:
        if part.name in states:
            part.restore(states[part.name])


async def close_parts(parts: Sequence[RunPart]) -> None:
    """Closes every part, also after one that fails."""
    for part in parts:
        try:
            await part.close()
        except Exception:
            logger.exception("closing %s failed", type(part).__name__)


def states_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of the parts in a checkpoint's state, by name. In format 1 they are one, under `memory`."""
    found = state.get("format", 1)
    if found == FORMAT:
        return state["parts"]
    if found != 1:
        raise ValueError(f"format {found} instead of {FORMAT}: another version of Troupe wrote it")
    memory = state["memory"]
    penalty = {name: memory[name] for name in PenaltyState.model_fields if name in memory}
    due = {"due": memory.get("unevaluated", False)}
    return {"penalty": penalty, "best": memory.get("best", {}), "evaluations": due}

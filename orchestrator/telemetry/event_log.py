"""`events.jsonl`: what happens in a run, besides its metrics."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from troupe.orchestrator.errors import StopRequested
from troupe.orchestrator.telemetry.json_lines import JsonLinesFile

logger = logging.getLogger(__name__)

Ended = Literal["finished", "stopped", "failed"]
"""How a run has ended that could record it (`run_ended`)."""
EVENTS = "events.jsonl"
EVALUATION, REWARDS = "evaluation", "rewards"
"""Fields of the event of a start: digests of how the run evaluates and of what its rewards are."""
_MOST_EARLY = 10_000
"""Events that are kept until the file is open."""
_LONGEST_REASON = 2000
"""Characters of an error's message in an event."""


class EventLog:
    """`events.jsonl`: what happened at which step of a run. Events before `open` are written when it opens."""

    def __init__(self) -> None:
        self.step = 0
        """The step in progress; every event carries it."""
        self.networks: dict[str, str] = {}
        """How fast the network between the nodes of a group of trainers is, by role."""
        self._early: deque[tuple[int, dict[str, object]]] = deque(maxlen=_MOST_EARLY)
        self._sink: JsonLinesFile | None = None

    def open(self, folder: Path, resume_at: int) -> None:
        """Writes to the folder from now on; events of steps after `resume_at` are dropped, all of them at 0."""
        self.step = resume_at
        try:
            self._sink = JsonLinesFile(folder / EVENTS, resume_at if resume_at > 0 else -1)
        except OSError as error:
            logger.warning("%s cannot be written: %s", folder / EVENTS, error.strerror)
            return
        for step, fields in self._early:
            self._sink.write(step, fields)
        self._early.clear()

    def record(self, event: str, **fields: object) -> None:
        """Records an event of the current step."""
        line = {"event": event, **fields}
        if self._sink is None:
            self._early.append((self.step, line))
        else:
            self._sink.write(self.step, line)

    def close(self) -> None:
        """Closes the file; later events are not written."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


@contextmanager
def recorded_failure(events: EventLog) -> Iterator[None]:
    """Records how the run ends if the block raises."""
    try:
        yield
    except StopRequested:
        events.record("run_ended", how="stopped")
        raise
    except BaseException as error:
        reason = str(error) or type(error).__name__
        events.record("run_ended", how="failed", error=type(error).__name__, detail=reason[:_LONGEST_REASON])
        raise

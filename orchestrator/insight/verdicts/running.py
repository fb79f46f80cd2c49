"""The verdicts on a run while it trains: an alarm is said once, when its rule first finds it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.verdicts.apply import apply_rules
from troupe.orchestrator.insight.verdicts.comparable import comparable_history
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.verdict import Level, Verdict
from troupe.orchestrator.telemetry.console import EndLines
from troupe.orchestrator.telemetry.run_folder import RunFolder

logger = logging.getLogger(__name__)

HEALTHY = "healthy: no check found anything wrong"
_OF_SPEED = frozenset({"slow-rewards", "starved-trainer", "starved-engines"})

_INTERVAL = 20
"""The rules are applied again when the run has become longer by this part of its steps."""
_CLOSE_S = 60.0


def verdicts_of(run: RunFolder) -> list[Verdict]:
    """The verdicts on what a run has recorded so far, problems first."""
    return apply_rules(comparable_history(run, History.of(run.metrics(), run.spec, run.events())))


def alarm_lines(verdicts: Sequence[Verdict], healthy: str = HEALTHY) -> list[str]:
    """What a terminal shows of verdicts: the lines of all alarms, or `healthy` (if not empty) without one."""
    alarms = [line for verdict in verdicts if verdict.is_alarm for line in verdict.lines()]
    return alarms or ([healthy] if healthy else [])


def faster(verdicts: Sequence[Verdict]) -> list[str]:
    """What would make the run faster, a line for each change."""
    return [remedy.line for verdict in verdicts if verdict.name in _OF_SPEED for remedy in verdict.remedies]


class RunningVerdicts:
    """Applies the rules to the records of a run while it trains, in a separate thread."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """`say` is called with the lines of each new alarm, from another thread."""
        self._folder = folder
        self._say = say
        self._said: dict[str, Level] = {}
        self._due = 0
        self._thread: threading.Thread | None = None

    def after_step(self, step: int) -> None:
        """Apply the rules, if enough steps have been recorded since the last time. Does not wait for them."""
        if step < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = step + max(1, step // _INTERVAL)
        self._thread = threading.Thread(target=self._look, name="verdicts", daemon=True)
        self._thread.start()

    def final(self) -> list[Verdict]:
        """All verdicts at the end of the run."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        return self._found()

    def at_end(self, complete: bool) -> EndLines:
        """What a terminal shows of all verdicts at the end of the run; `healthy` only of a complete one."""
        verdicts = self.final()
        return EndLines(alarm_lines(verdicts, HEALTHY if complete else ""), faster(verdicts))

    def _look(self) -> None:
        for verdict in self._found():
            # One that has become a problem is said again, one that was a problem is not.
            if verdict.is_alarm and self._said.get(verdict.name) not in (verdict.level, Level.PROBLEM):
                self._said[verdict.name] = verdict.level
                for line in verdict.lines():
                    self._say(line)

    def _found(self) -> list[Verdict]:
        """Verdicts so far; empty, with a line in the log, if the records cannot be read: no run ends for that."""
        try:
            return verdicts_of(RunFolder(self._folder))
        except (TroupeError, OSError) as error:
            logger.warning("no verdicts: %s", error)
            return []

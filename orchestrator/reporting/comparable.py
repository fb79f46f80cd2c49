"""Which evaluations of a run can be compared with its last one: a resumed run may have changed how they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from troupe.orchestrator.reporting.evaluation_log import EVALUATIONS, comparable, read_evaluations
from troupe.orchestrator.reporting.run_folder import RunFolder
from troupe.orchestrator.reporting.verdicts.history import EVALUATED, History


def comparable_history(run: RunFolder, history: History) -> History:
    """The record of a run without evaluations that were made in another way than the last one.

    How they were made is in `evaluation.json`; a run that writes none (offline training) has it in the events of its
    starts. Evaluations of which neither says it, of earlier versions, stay.
    """
    others = _by_file(run)
    return history.without_evaluations(_by_starts(history) if others is None else others)


def _by_file(run: RunFolder) -> set[int] | None:
    """Steps whose evaluation has other settings than the last one; None: no file says it."""
    made = read_evaluations(run.path / EVALUATIONS).get("evaluations")
    try:
        return {one["step"] for one in made} - {one["step"] for one in comparable(made)} if made else None
    except (LookupError, TypeError, AttributeError):  # the file is damaged
        return None


def _by_starts(history: History) -> set[int]:
    """Steps whose evaluation has another digest than the last one, by the starts of the run."""
    starts = [event for event in history.events if event.get("event") == "run_started"]
    steps = sorted({step for series in history.named(EVALUATED) for step in series.steps})
    digests = {step: _digest_at(step, starts) for step in steps}
    last = digests[steps[-1]] if steps else None
    return {step for step, digest in digests.items() if digest and last and digest != last}


def _digest_at(step: int, starts: Sequence[Mapping[str, Any]]) -> str | None:
    """Digest of how the last process that made this step evaluated; None: it is not known."""
    for start in reversed(starts):
        resumed_at = start.get("resume_at") or 0
        if resumed_at < step or step == resumed_at == 0:
            return start.get("evaluation")
    return None

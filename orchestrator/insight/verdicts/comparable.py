"""Drops results that cannot be compared with a run's newest: a resumed run may evaluate or reward differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, comparable, read_evaluations
from troupe.orchestrator.telemetry.event_log import EVALUATION, REWARDS
from troupe.orchestrator.telemetry.run_folder import RunFolder

_EVALUATED = ("eval/",)
_REWARDED = ("reward/", "groups/mixed", "alarm/reward_hacking")
"""Name prefixes of the metrics that each digest covers."""


def comparable_history(run: RunFolder, history: History) -> History:
    """The record of a run without results made under other settings than the newest ones.

    Settings of evaluations are read from `evaluation.json`, or from `run_started` events if a run writes none (offline
    training); settings of rewards from these events. Results without either (older versions) are kept.
    """
    evaluated = _by_file(run)
    if evaluated is None:
        evaluated = _by_starts(history, EVALUATION, _EVALUATED)
    rewarded = _by_starts(history, REWARDS, _REWARDED)
    return history.without(_EVALUATED, evaluated).without(_REWARDED, rewarded)


def _by_file(run: RunFolder) -> set[int] | None:
    """Steps whose evaluation has other settings than the newest one, or None without such a file."""
    made = read_evaluations(run.path / EVALUATIONS).get("evaluations")
    try:
        return {one["step"] for one in made} - {one["step"] for one in comparable(made)} if made else None
    except (LookupError, TypeError, AttributeError):  # the file is damaged
        return None


def _by_starts(history: History, digest: str, names: tuple[str, ...]) -> set[int]:
    """Steps whose `digest` differs from the newest step's; digests are read from `run_started` events."""
    starts = [event for event in history.events if event.get("event") == "run_started"]
    steps = sorted({step for name in names for series in history.named(name) for step in series.steps})
    digests = {step: _at(step, starts).get(digest) for step in steps}
    last = digests[steps[-1]] if steps else None
    return {step for step, found in digests.items() if found and last and found != last}


def _at(step: int, starts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The start of the last process that made this step; empty if unknown."""
    for start in reversed(starts):
        resumed_at = start.get("resume_at") or 0
        if resumed_at < step or step == resumed_at == 0:
            return start
    return {}

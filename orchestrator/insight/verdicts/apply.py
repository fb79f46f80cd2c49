"""The verdicts on a run: all rules on its record, what a terminal shows of them, and while it trains."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.verdicts import data, learning, speed, updates
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.verdict import Level, Name, Remedy, Verdict
from troupe.orchestrator.live.run_state import RunState
from troupe.orchestrator.plan.placement import demand, place, role_sizes
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, comparable, read_evaluations
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import Source, SpecError
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.orchestrator.telemetry.console import EndLines
from troupe.orchestrator.telemetry.event_log import EVALUATION, REWARDS
from troupe.orchestrator.telemetry.run_folder import RunFolder

_ENDS: Final[Mapping[str, tuple[Name, str]]] = {
    "failed": ("failed-run", "The run has failed"),
    "died": ("dead-run", "The run has died"),
}
"""The verdict, and its title, on a run in a state."""


def failed(run: History) -> Iterator[Verdict]:
    if (end := _ENDS.get(run.state.name)) is None:
        return
    resume = Remedy("`troupe why RUN` shows what was known; `troupe run --resume` continues from its checkpoint.")
    why = run.state.detail or "its error is not recorded"
    remedies = (resume,) if run.last_step else ()
    yield Verdict(end[0], Level.PROBLEM, end[1], f"It ended {run.state.where}: {why}", run.last_step, remedies=remedies)


def no_steps(run: History) -> Iterator[Verdict]:
    if run.last_step or run.state.name in _ENDS:
        return
    yield Verdict("no-steps", Level.WARNING, "No step is recorded", _NO_STEP.get(run.state.name, str(run.state)), 0)


_NO_STEP: Final[Mapping[str, str]] = {
    "running": "It is starting.",
    "stopped": "The run was stopped before its first step.",
}


logger = logging.getLogger(__name__)

Rule = Callable[[History], Iterator[Verdict]]
RULES: tuple[Rule, ...] = (
    *(failed, no_steps),
    *(learning.entropy_collapse, learning.reward_hacking, learning.no_signal, learning.reward_falls),
    *(learning.penalty_dominates, learning.overfitting),
    *(learning.length_explosion, learning.length_collapse, learning.truncation),
    *(updates.kl_explosion, updates.steps_too_large, updates.clip_fraction_stuck, updates.sampler_gap),
    *(updates.gradient_spikes, updates.clipped_gradients, updates.blind_critic),
    *(data.failing_rewards, data.repeated_data, data.unusable_data, data.dropped_samples),
    *(speed.slow_rewards, speed.slow_engine, speed.starved_trainer, speed.starved_engines),
    *(speed.growing_memory, speed.lost_workers),
)
_ORDER = (Level.PROBLEM, Level.WARNING, Level.NOTE)
_EVALUATED = ("eval/",)
_REWARDED = ("reward/", "groups/mixed")
"""Name prefixes of the metrics that each digest covers."""
HEALTHY = "healthy: no check found anything wrong"
SO_FAR = "no check found anything wrong so far"
_OF_SPEED = frozenset({"slow-rewards", "starved-trainer", "starved-engines"})
_INTERVAL = 20
"""The rules are applied again when the run has become longer by this part of its steps."""
_CLOSE_S = 60.0


def apply_rules(history: History) -> list[Verdict]:
    """The verdicts of every rule: problems first, then by their first step. Remedies are left out if the spec has
    their lines or cannot take them, or the cluster has no room."""
    usable = bool(history.spec) and _loads(history.spec) is not None
    capacity = history.capacity
    found = [
        replace(verdict, remedies=tuple(r for r in verdict.remedies if not usable or fits(r, history.spec, capacity)))
        for rule in RULES
        for verdict in _verdicts(rule, history)
    ]
    return sorted(found, key=lambda verdict: (_ORDER.index(verdict.level), verdict.since))


def _verdicts(rule: Rule, history: History) -> Iterator[Verdict]:
    """What a rule finds. A rule that fails on a record is logged, and the others are still applied."""
    try:
        yield from rule(history)
    except Exception:
        logger.exception("the rule %s is left out: it failed on this run", rule.__name__)


def fits(remedy: Remedy, spec: Mapping[str, Any], capacity: Mapping[str, float] | None = None) -> bool:
    """Whether the lines of a remedy change the spec and leave it valid, and what they add fits into the cluster.
    `capacity`: `CPU` and `GPU` of the cluster; None or without one of them: not known."""
    if not remedy.spec:
        return True
    edited = with_lines(spec, remedy.spec)
    changed = None if edited == spec else _loads(edited)
    if changed is None or not capacity:
        return changed is not None
    before, after = _request(_loads(spec)), _request(changed)
    return all(after[kind] <= max(before[kind], capacity.get(kind, math.inf)) for kind in after)


def _request(spec: RunSpec | None) -> dict[str, float]:
    return {} if spec is None else demand(place(role_sizes(spec)))


def with_lines(spec: Mapping[str, Any], lines: str) -> dict[str, Any]:
    """A spec with the lines of a remedy instead of its lines; a section is merged, a list replaced."""
    return _merged(copy.deepcopy(dict(spec)), yaml.safe_load(lines))


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in above.items():
        under = below.get(name)
        below[name] = _merged(under, value) if isinstance(under, dict) and isinstance(value, Mapping) else value
    return below


def _loads(spec: Mapping[str, Any]) -> RunSpec | None:
    """The spec, or None if it is not valid."""
    try:
        return parse_spec(Document(dict(spec), Source("spec.yaml")))
    except (SpecError, TroupeError):
        return None


def comparable_history(run: RunFolder, history: History) -> History:
    """The record without results made under other settings than the newest: of evaluations by `evaluation.json`,
    else by `run_started` events, of rewards by these. Results without either are kept."""
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


@dataclass(frozen=True)
class RunReport:
    """What `troupe report --json` prints of a run."""

    state: RunState
    verdicts: tuple[Verdict, ...]
    """Problems first."""

    def lines(self) -> list[str]:
        """What a terminal shows: the state, unless the run has finished, and the alarms or that there are none."""
        finished = self.state.name == "finished"
        return [*([] if finished else [str(self.state)]), *alarm_lines(self.verdicts, HEALTHY if finished else SO_FAR)]


def report_of(run: RunFolder) -> RunReport:
    """The state of a run, and the verdicts on what it has recorded so far."""
    history = History.read(run, run.metrics())
    return RunReport(history.state, tuple(apply_rules(comparable_history(run, history))))


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
        self._said: dict[str, Verdict] = {}
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
        ends = {name for name, _ in _ENDS.values()}  # how it has ended is shown
        verdicts = [one for one in self.final() if one.name not in ends]
        alarms = {one.name for one in verdicts if one.is_alarm}
        over = "; ".join(said.title for name, said in self._said.items() if name not in alarms)
        healthy = f"healthy at the end; no longer an alarm: {over}" if over else HEALTHY
        return EndLines(alarm_lines(verdicts, healthy if complete else ""), faster(verdicts))

    def _look(self) -> None:
        for verdict in self._found():
            # One that has become a problem is said again, one that was a problem is not.
            said = self._said.get(verdict.name)
            if verdict.is_alarm and (said is None or said.level not in (verdict.level, Level.PROBLEM)):
                self._said[verdict.name] = verdict
                for line in verdict.lines():
                    self._say(line)

    def _found(self) -> list[Verdict]:
        """Verdicts so far; empty, with a line in the log, if the records cannot be read: no run ends for that."""
        try:
            return [*report_of(RunFolder(self._folder)).verdicts]
        except (TroupeError, OSError) as error:
            logger.warning("no verdicts: %s", error)
            return []

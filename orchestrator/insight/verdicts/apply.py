"""Applies all rules to the history of a run."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.verdicts import data, learning, responses, speed, updates
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict
from troupe.orchestrator.plan.placement import demand, place, role_sizes
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import Source, SpecError
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.yaml_reader import Document

logger = logging.getLogger(__name__)

Rule = Callable[[History], Iterator[Verdict]]

RULES: tuple[Rule, ...] = (
    *(learning.entropy_collapse, learning.reward_hacking, learning.no_signal, learning.reward_falls),
    *(learning.penalty_dominates, learning.overfitting),
    *(responses.length_explosion, responses.length_collapse, responses.truncation),
    *(updates.kl_explosion, updates.steps_too_large, updates.clip_fraction_stuck, updates.sampler_gap),
    *(updates.gradient_spikes, updates.clipped_gradients, updates.blind_critic),
    *(data.failing_rewards, data.repeated_data, data.unusable_data, data.dropped_samples),
    *(speed.slow_rewards, speed.starved_trainer, speed.starved_engines, speed.growing_memory, speed.lost_workers),
)
_ORDER = (Level.PROBLEM, Level.WARNING, Level.NOTE)


def apply_rules(history: History) -> list[Verdict]:
    """The verdicts of every rule: problems first, then by the step at which they began.

    A remedy is left out if the run's spec has its lines already or cannot take them (an option that its algorithm
    lacks), or if the cluster has no room for its workers.
    """
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

    Args:
        remedy: The change.
        spec: A valid spec.
        capacity: `CPU` and `GPU` of the cluster; None or without one of them: not known.
    """
    if not remedy.spec:
        return True
    edited = with_lines(spec, remedy.spec)
    changed = None if edited == spec else _loads(edited)
    if changed is None or not capacity:
        return changed is not None
    before, after = _request(_loads(spec)), _request(changed)
    return all(after[kind] <= max(before[kind], capacity.get(kind, math.inf)) for kind in after)


def _request(spec: RunSpec | None) -> dict[str, float]:
    """CPUs and GPUs that a run reserves."""
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

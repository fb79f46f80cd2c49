"""Who waits for whom: open calls, the processes behind them, and the one that blocks the others."""

from __future__ import annotations

from collections.abc import Iterable

from troupe.orchestrator.cluster.inspection import ProcessFacts
from troupe.orchestrator.insight.why.behaviour import Behaviour, behaviour_of
from troupe.orchestrator.insight.why.facts import Call, Facts
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.roles.table import ROLES
from troupe.orchestrator.telemetry.timeline import DRIVER

_LONG_POLLS = frozenset({"watch"})
"""Calls that answer only when something has happened."""
_PROBES = frozenset({"health", "save_status"})
_BEHIND = {row.behind: row.section for row in ROLES.values() if row.behind is not None}
"""Roles whose workers serve a call of this method without the driver."""
_AS_OLD = 0.3
"""Another call may be the cause if it has at least this share of the oldest call's age."""
_WEIGHT = {"gone": 5, "disk": 5, "lock": 4, "sleep": 4, "busy": 2, "waits": 1, "collective": 1, "stopped": 5}
_USER_CODE = 4


def is_bounded(worker: str, method: str) -> bool:
    """Whether a call waits for work: not for news, and not a phase of the driver's own."""
    return worker != DRIVER and method not in _LONG_POLLS


def open_calls(facts: Facts) -> list[Call]:
    """Calls that block the run, oldest first; probes only if there are no others."""
    calls = sorted(facts.calls, key=lambda call: -call.age_s)
    return [call for call in calls if call.method not in _PROBES] or calls


def roles_behind(calls: Iterable[Call]) -> set[str]:
    """Roles whose workers serve one of these calls without the driver."""
    return {_BEHIND[call.method] for call in calls if call.method in _BEHIND}


def related(facts: Facts, call: Call) -> tuple[ProcessFacts, ...]:
    """The processes that serve a call: its worker's, and those called by this worker."""
    own = facts.tree(call.worker)
    if call.method == "start":  # what has ended is what it replaces
        own = tuple(process for process in own if process.state)
    return (*own, *facts.role(_BEHIND.get(call.method, "")))


def subject(facts: Facts, call: Call, process: ProcessFacts) -> str:
    """The process as the subject of a sentence about a call."""
    if process.worker != call.worker:
        return f"process {process.pid} of {process.worker}"
    if process.pid == facts.workers.get(call.worker):
        return "it"
    name = next(iter(process.title.split()), "").rpartition("/")[2]
    return f"its process {name} ({process.pid})" if name else f"its process {process.pid}"


def missing_rank(facts: Facts, call: Call, blocking: Iterable[str]) -> str:
    """How many other ranks of the role wait in a collective, as the end of a sentence; empty if none does."""
    role, blocking = role_of(call.worker), set(blocking)
    others = {p.worker for p in facts.role(role) if p.worker not in blocking and behaviour_of(p).kind == "collective"}
    if not others:
        return ""
    return f"; the other {len(others)} rank(s) of {role} wait in a collective"


def oldest_wait(facts: Facts) -> tuple[Call, Behaviour, str] | None:
    """The call that blocks the run, what the process behind it does, and who else waits for that process."""
    calls = open_calls(facts)
    if not calls:
        return None
    candidates = [call for call in calls if call.age_s >= _AS_OLD * calls[0].age_s]
    found: list[tuple[int, Call, Behaviour]] = []
    for call in candidates:
        # Descendants first: a process waits for its children.
        behaviours = [behaviour_of(process) for process in reversed(related(facts, call))]
        found += [(_weight(facts, call, behaviour), call, behaviour) for behaviour in behaviours]
    if not found:
        return None
    _, call, behaviour = max(found, key=lambda one: one[0])  # of equal ones the first: the oldest call's
    others = missing_rank(facts, call, {behaviour.process.worker}) if behaviour.kind != "collective" else ""
    return call, behaviour, others


def _weight(facts: Facts, call: Call, behaviour: Behaviour) -> int:
    """How likely the process is the cause."""
    process = behaviour.process
    descendant = process.pid != facts.workers.get(process.worker)
    if descendant and behaviour.kind == "gone":
        return 0  # a child that has done its work
    if descendant and behaviour.kind == "waits" and not process.threads:
        return 0  # a resource tracker, a guard
    weight = max(_WEIGHT[behaviour.kind], _USER_CODE * behaviour.in_user_code)
    if behaviour.kind in ("waits", "busy") and missing_rank(facts, call, {process.worker}):
        weight = max(weight, _USER_CODE)  # the others wait for this rank
    return weight

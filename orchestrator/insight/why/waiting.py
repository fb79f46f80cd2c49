"""What every process does, and who waits for whom: open calls and the process that blocks the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from troupe.orchestrator.cluster.inspection import ProcessFacts
from troupe.orchestrator.cluster.stack_dumps import Frame, Thread
from troupe.orchestrator.insight.why.facts import Call, Facts
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.roles.table import ROLES
from troupe.orchestrator.telemetry.timeline import DRIVER

_LONG_POLLS = frozenset({"watch"})
"""Calls that answer only when something has happened."""
_PROBES = frozenset({"health", "save_status"})
_BEHIND = [(row.behind, row.section) for row in ROLES.values() if row.behind is not None]
"""Roles whose workers serve a call of this method without the driver."""
_AS_OLD = 0.3
"""Another call may be the cause if it has at least this share of the oldest call's age."""
_WEIGHT = {"gone": 5, "disk": 5, "lock": 4, "sleep": 4, "busy": 2, "waits": 1, "collective": 1, "stopped": 5}
_USER_CODE = 4
Kind = Literal["gone", "stopped", "disk", "collective", "lock", "sleep", "busy", "waits"]
BUSY = 0.4
"""A process computes if it uses at least this many CPU seconds per second."""
_STARVED = 0.05
"""The same for a process that could run at the moment of the look: others use the cores."""
_COLLECTIVE_FILES = ("distributed_c10d.py", "deepspeed/comm/")
_LOCK_SOURCE = (".acquire(", "lock", "mutex", ".join(", "condition")
_SHOWN_FRAMES = 6


def is_bounded(worker: str, method: str) -> bool:
    """Whether a call waits for work: not for news, and not a phase of the driver's own."""
    return worker != DRIVER and method not in _LONG_POLLS


def open_calls(facts: Facts) -> list[Call]:
    """Calls that block the run, oldest first; probes only if there are no others."""
    calls = sorted(facts.calls, key=lambda call: -call.age_s)
    return [call for call in calls if call.method not in _PROBES] or calls


def roles_behind(calls: Iterable[Call]) -> set[str]:
    """Roles whose workers serve one of these calls without the driver."""
    methods = {call.method for call in calls}
    return {role for method, role in _BEHIND if method in methods}


def related(facts: Facts, call: Call) -> tuple[ProcessFacts, ...]:
    """The processes that serve a call: its worker's, and those called by this worker."""
    own = facts.tree(call.worker)
    if call.method == "start":  # what has ended is what it replaces
        own = tuple(process for process in own if process.state)
    return (*own, *(one for method, role in _BEHIND if method == call.method for one in facts.role(role)))


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


@dataclass(frozen=True)
class Behaviour:
    """What a process does."""

    process: ProcessFacts
    kind: Kind
    doing: str
    """End of a sentence that begins with the process."""
    frame: Frame | None = None
    """Where, in the code that matters most: the user's before Troupe's before a library's."""

    @property
    def in_user_code(self) -> bool:
        """Whether it is in the user's own code."""
        return self.frame is not None and self.frame.origin == "user"


def behaviour_of(process: ProcessFacts) -> Behaviour:
    thread = telling_thread(process)
    frame = None if thread is None else _telling_frame(thread)
    kind, doing = _kind(process, thread, frame)
    return Behaviour(process, kind, doing, frame)


def telling_thread(process: ProcessFacts) -> Thread | None:
    """The thread that says most: one in the user's code, else the main thread."""
    in_user_code = [thread for thread in process.threads if thread.innermost("user") is not None]
    main = process.threads[-1:]
    return next((thread for thread in (*reversed(in_user_code), *main)), None)


def stack_lines(process: ProcessFacts) -> list[str]:
    """The innermost frames of the threads in user code, or of the main thread."""
    telling = telling_thread(process)
    if telling is None:
        return [f"stack of process {process.pid}: none was written"] if process.state else []
    shown = [thread for thread in process.threads if thread.innermost("user") is not None] or [telling]
    lines = []
    for thread in shown[:2]:
        lines.append(f"stack of {process.worker}, process {process.pid} (innermost first):")
        lines += [f"  {frame}" for frame in _worth_showing(thread)]
    return lines


def process_line(process: ProcessFacts) -> str:
    """Process, state, CPU time and memory in one line."""
    words = [f"{process.worker}: process {process.pid}", f"state {process.state or 'gone'}"]
    words.append(f"{process.cpu:.2f} CPU seconds in the last second, {process.resident >> 20} MiB")
    if process.waits_in:
        words.append(f"in {process.waits_in}")
    if process.waits_for_device and process.state != "D":
        words.append("a thread in state D")
    return f"{', '.join(words)}  [{process.title}]"


def _kind(process: ProcessFacts, thread: Thread | None, frame: Frame | None) -> tuple[Kind, str]:
    at = f" in {frame}" if frame is not None else ""
    if not process.state or process.state == "Z":
        return "gone", "has ended"
    if process.state == "T":
        return "stopped", "is stopped (SIGSTOP, state T)"
    if process.state == "D" or process.waits_for_device:
        within = f", in {process.waits_in}" if process.state == "D" and process.waits_in else ""
        return "disk", f"waits for the disk (state D{within}){at}"
    if thread is not None and any(name in frame.file for frame in thread.frames[:8] for name in _COLLECTIVE_FILES):
        return "collective", f"waits in a collective for the other ranks{at}"
    if process.cpu >= BUSY or (process.state == "R" and process.cpu >= _STARVED):
        return "busy", f"computes ({process.cpu:.2f} CPU seconds in the last second){at}"
    if frame is not None and "sleep" in (process.waits_in + frame.source) and frame.origin == "user":
        return "sleep", f"sleeps{at}"
    if frame is not None and _at_lock(thread, frame):
        return "lock", f"waits for a lock{at}"
    return "waits", f"waits{at}"


def _at_lock(thread: Thread | None, frame: Frame) -> bool:
    """Whether the innermost frame is at a lock: in `threading`, or a line of the user's that takes one."""
    innermost = None if thread is None else thread.frames[0]
    if innermost is not None and innermost.file.endswith("/threading.py"):
        return frame.origin == "user"
    at_lock = frame.source.startswith(("with ", "async with ")) or any(w in frame.source.lower() for w in _LOCK_SOURCE)
    return innermost == frame and frame.origin == "user" and at_lock


def _telling_frame(thread: Thread) -> Frame | None:
    for origin in ("user", "troupe", "library"):
        if (frame := thread.innermost(origin)) is not None:
            return frame
    return None


def _worth_showing(thread: Thread) -> list[Frame]:
    """The innermost frames, and the frame that matters if it is further out."""
    shown = list(thread.frames[:_SHOWN_FRAMES])
    telling = _telling_frame(thread)
    return shown if telling is None or telling in shown else [*shown, telling]

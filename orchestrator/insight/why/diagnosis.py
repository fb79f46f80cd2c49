"""Derives a diagnosis from facts. Rules are tried in order of how much they explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from troupe.orchestrator.cluster.inspection import NodeFacts, ProcessFacts
from troupe.orchestrator.insight.why.facts import Diagnosis, Facts
from troupe.orchestrator.insight.why.waiting import (
    Behaviour,
    behaviour_of,
    missing_rank,
    oldest_wait,
    open_calls,
    process_line,
    related,
    stack_lines,
    subject,
)
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.roles.table import named
from troupe.orchestrator.telemetry.timeline import DRIVER

_TRAINERS = named(lambda row: row.trains)
_SERVICES = ("gcs_server", "raylet")
_FULL_BYTES = 2**22
"""Free space below which a file system counts as full."""
_NEARLY = 0.05
"""A file system may cause an error about space below this share of free space."""
_SLOW = 3.0
"""A step counts as slow above this multiple of its usual duration."""
_SHOWN_CALLS = 8
_SPACE = ("no space left", "disk quota exceeded", "enospc")
_MEMORY = ("out of memory", "cannot allocate memory", "memoryerror", "out-of-memory")
_LIMITED = "out of memory (limit "
"""What user code says that has used up its own limit; the node may have memory left."""


def diagnose(facts: Facts) -> Diagnosis:
    """Why the run is slow, stuck or dead."""
    found = next((found for rule in _RULES if (found := rule(facts)) is not None), None)
    if found is None:
        usual = f" (a step usually takes {facts.run.usual_step_s:.1f} s)" if facts.run.usual_step_s else ""
        phase = f" in {facts.run.phase} {facts.run.progress}".rstrip() if facts.run.phase else ""
        call = next(iter(open_calls(facts)), None)
        waits = "no call is open" if call is None else f"it waits for {call}{call.detail and f': {call.detail}'}"
        summary = f"{facts.run.location} has been running for {facts.run.step_s:.0f} s{usual}{phase}; {waits}"
        found = Diagnosis("waits" if call is not None and _slow(facts) else "running", summary)
    return replace(found, evidence=(*found.evidence, *_circumstances(facts, found)))


def _driver_dead(facts: Facts) -> Diagnosis | None:
    driver = facts.driver
    if driver.state != "dead":
        return None
    cause, blocked_by = "driver_dead", DRIVER
    why = "so it was killed (SIGKILL) or exited at once (a second Ctrl-C)"
    if _kills(facts):
        why = "so it was killed by the kernel's out-of-memory killer"
    elif full := _full(facts):
        why, cause, blocked_by = f"and {full} is full", "full", full
    waited = f", waiting for {oldest}" if (oldest := next(iter(open_calls(facts)), None)) is not None else ""
    summary = (
        f"the driver (process {driver.pid} on {driver.host}) is dead: it left no last report, {why}; "
        f"{driver.last_seen_s:.0f} s ago it was in {facts.run.in_phase}{waited}"
    )
    return Diagnosis(cause, summary, blocked_by)


def _run_failed(facts: Facts) -> Diagnosis | None:
    """The run ends with an error: the error, and what its node recorded about it."""
    if not facts.error:
        return None
    summary, text = f"{facts.run.in_phase} failed: {facts.error}", facts.error.lower()
    if full := _full(facts, nearly=any(word in text for word in _SPACE)):
        return Diagnosis("full", f"{full} is full, and {summary}", full)
    words = next(iter(facts.exit_reasons), "")
    # The killer also ends processes of others: it explains a worker whose log shows no error.
    killed = _kills(facts) and any("SIGKILL" in reason for reason in facts.exit_reasons)
    if killed or (any(word in text for word in _MEMORY) and _LIMITED not in text):
        return Diagnosis("memory", f"{summary}; the node has run out of memory", "")
    if words:
        summary = f"{summary}; {words}"
    return Diagnosis("run_failed", summary)


def _driver_stopped(facts: Facts) -> Diagnosis | None:
    if facts.driver.state != "stopped":
        return None
    summary = f"the driver (process {facts.driver.pid}) is stopped (SIGSTOP, state T): `kill -CONT` continues it"
    return Diagnosis("driver_stopped", summary, DRIVER)


def _ray_stopped(facts: Facts) -> Diagnosis | None:
    if facts.run.phase == "close":  # they are ended on purpose
        return None
    for process in facts.processes:
        if process.worker in _SERVICES and process.state in ("T", "Z", ""):
            how = "is stopped (SIGSTOP, state T)" if process.state == "T" else "has ended"
            summary = f"Ray's {process.worker} (process {process.pid} on {process.node}) {how}"
            return Diagnosis("ray_stopped", f"{facts.run.location} waits for Ray: {summary}", process.worker)
    return None


def _worker_stopped(facts: Facts) -> Diagnosis | None:
    stopped = [process for process in facts.processes if process.state == "T"]
    if not stopped:
        return None
    calls = open_calls(facts)
    waited = [(call, process) for call in calls for process in related(facts, call) if process.state == "T"]
    if not waited:
        names = ", ".join(f"{process.worker} (process {process.pid})" for process in stopped)
        return Diagnosis("worker_stopped", f"stopped (SIGSTOP, state T), but not waited for yet: {names}", names)
    call, process = waited[0]
    others = missing_rank(facts, call, {process.worker for process in stopped})
    who = subject(facts, call, process)
    summary = f"{facts.run.location} waits for {call}: {who} is stopped (SIGSTOP, state T){others}"
    return Diagnosis("worker_stopped", summary, process.worker, (process_line(process), *stack_lines(process)))


def _node_lost(facts: Facts) -> Diagnosis | None:
    lost = [node for node in facts.nodes if not node.alive or not node.reachable]
    if not lost:
        return None
    node = lost[0]
    how = "is dead" if not node.alive else "does not answer"
    calls = [call for call in open_calls(facts) if call.worker in node.workers]
    if calls:
        return Diagnosis(
            "node_lost", f"{facts.run.location} waits for {calls[0]}: its node {node.name} {how}", node.name
        )
    if node.workers:
        on_it = f"{', '.join(node.workers)} ran on it"
        return Diagnosis("node_lost", f"node {node.name} {how}: {on_it}", node.name)
    if _serving(facts):
        return None
    starting = [call for call in open_calls(facts) if call.method == "start"]
    names = [call.worker for call in starting] or list(facts.queues.starting)
    if names or facts.queues.waiting:
        waits = f"{facts.run.location} waits for {', '.join(names) or 'an engine'} to start"
        return Diagnosis("node_lost", f"{waits}: node {node.name} {how}, and no other node has room", node.name)
    return None


def _driver_blocked(facts: Facts) -> Diagnosis | None:
    driver = facts.driver
    if driver.state not in ("blocked", "silent"):
        return None
    if driver.state == "silent" and _full(facts):
        return None  # it could not write its answer
    own = next(iter(facts.tree(DRIVER)), None)
    behaviour = None if own is None else behaviour_of(own)
    what = "the driver's event loop is blocked" if driver.state == "blocked" else "the driver does not answer"
    doing = "" if behaviour is None else f": its process {driver.pid} {behaviour.doing}"
    cause = "disk" if behaviour is not None and behaviour.kind == "disk" else "driver_blocked"
    said = " ".join(filter(None, [what, _for(driver.blocked_s)]))
    return Diagnosis(cause, f"{said}{doing}", DRIVER, () if own is None else tuple(stack_lines(own)))


def _no_space(facts: Facts) -> Diagnosis | None:
    full = _full(facts)
    if not full:
        return None
    call = next(iter(open_calls(facts)), None)
    waits = f"{facts.run.location} waits for {call}" if call is not None else f"{facts.run.location} is running"
    return Diagnosis("full", f"{full} is full; {waits}", full)


def _worker_gone(facts: Facts) -> Diagnosis | None:
    for call in open_calls(facts):
        pid = facts.workers.get(call.worker)
        process = next((p for p in facts.tree(call.worker) if p.pid == pid), None)
        if process is not None and process.state in ("", "Z") and call.method != "start":
            words = "; ".join(facts.exit_reasons)
            summary = f"{facts.run.location} waits for {call}: its process {pid} has ended{words and f': {words}'}"
            return Diagnosis("worker_gone", summary, call.worker)
    return None


def _trainer_gone(facts: Facts) -> Diagnosis | None:
    """A trainer whose process has ended, and that no call has reached since."""
    called = {call.worker for call in open_calls(facts)}
    for name, pid in facts.workers.items():
        if name in called or role_of(name) not in _TRAINERS:
            continue
        process = next((p for p in facts.tree(name) if p.pid == pid), None)
        if process is not None and process.state in ("", "Z"):
            words = "; ".join(facts.exit_reasons)
            summary = (
                f"{name} is dead: its process {pid} has ended{words and f' ({words})'}; the next probe restarts it"
            )
            return Diagnosis("worker_gone", f"{facts.run.location}: {summary}", name)
    return None


def _no_engine(facts: Facts) -> Diagnosis | None:
    queues = facts.queues
    if _serving(facts) or not queues.waiting or not facts.run.steps:
        return None
    starting = f"{', '.join(queues.starting)} is starting" if queues.starting else "none is starting"
    summary = f"{facts.run.location} waits for an engine: none serves, {starting}, {queues.waiting} group(s) wait"
    return Diagnosis("no_engine", summary, next(iter(queues.starting), ""))


def _waits(facts: Facts) -> Diagnosis | None:
    """What the run waits for, and what that does."""
    found = oldest_wait(facts)
    if found is None:
        return None
    call, behaviour, others = found
    who = subject(facts, call, behaviour.process)
    summary = f"{facts.run.location} waits for {call}: {who} {behaviour.doing}{others}"
    cause = _cause_of(behaviour, others)
    run = facts.run
    if cause in ("busy", "waits") and not _slow(facts):
        summary, cause = f"nothing is stuck: {summary} (a step usually takes {run.usual_step_s:.1f} s)", "running"
    elif run.usual_step_s:
        summary += f"; the step has taken {run.step_s:.0f} s, usually {run.usual_step_s:.1f} s"
    evidence = (process_line(behaviour.process), *stack_lines(behaviour.process))
    return Diagnosis(cause, summary, behaviour.process.worker, evidence)


def _cause_of(behaviour: Behaviour, others: str) -> str:
    if behaviour.kind in ("disk", "lock", "sleep"):
        return behaviour.kind
    if others:
        return "missing_rank"
    return "user_code" if behaviour.in_user_code else behaviour.kind


_RULES: Sequence[Callable[[Facts], Diagnosis | None]] = (
    *(_driver_dead, _run_failed, _driver_stopped, _ray_stopped, _worker_stopped, _node_lost, _driver_blocked),
    *(_no_space, _worker_gone, _trainer_gone, _no_engine, _waits),
)


def _slow(facts: Facts) -> bool:
    """Whether the step takes far longer than usual, or nothing is usual yet."""
    return not facts.run.usual_step_s or facts.run.step_s > _SLOW * facts.run.usual_step_s


def _serving(facts: Facts) -> bool:
    """Whether an engine serves, sleeps until it has new weights, or evaluates."""
    return any(engine.state in ("serving", "asleep", "evaluating") for engine in facts.queues.engines)


def _full(facts: Facts, *, nearly: bool = False) -> str:
    """The fullest file system that is full, or nearly full; empty if there is none."""
    places = [
        (free, total, f"{path} on {node.name}")
        for node in facts.nodes
        for path, free, total in (("/dev/shm", node.shm_free, node.shm_total), *node.disks)
        if free >= 0 and total > 0
    ]
    full = [place for place in places if place[0] < max(_FULL_BYTES, _NEARLY * place[1] * nearly)]
    return min(full, key=lambda place: place[0] / place[1])[2] if full else ""


def _kills(facts: Facts) -> int:
    """Processes that the out-of-memory killer of the driver's node has ended during the run."""
    # Its counter starts again with the machine.
    return max((0, *(node.out_of_memory_kills - facts.kills_before for node in facts.nodes[:1])))


def _for(seconds: float) -> str:
    """How long something has lasted, as in `for 12 s`; empty below a second."""
    return f"for {seconds:.0f} s" if round(seconds) else ""


def _circumstances(facts: Facts, found: Diagnosis) -> list[str]:
    """Evidence that every diagnosis comes with: who waits for whom, queues, processes, nodes, exit reasons."""
    run = facts.run
    phase = " ".join(filter(None, [run.phase, run.progress, _for(run.phase_s)]))
    lines = ["; ".join(filter(None, [f"run {run.name}: {run.steps} of {run.total} steps", phase]))]
    calls = open_calls(facts)
    lines += [f"the driver waits for {call}{call.detail and f': {call.detail}'}" for call in calls[:_SHOWN_CALLS]]
    if len(calls) > _SHOWN_CALLS:
        lines.append(f"and for {len(calls) - _SHOWN_CALLS} further call(s)")
    queues = facts.queues
    lines += [f"{engine.name}: {engine.state}, {engine.outstanding} samples sent" for engine in queues.engines]
    if queues.waiting or queues.starting:
        lines.append(f"groups that wait for an engine: {queues.waiting}; starting: {', '.join(queues.starting) or '-'}")
    shown = {line.split("  [")[0] for line in found.evidence}
    lines += [line for p in _notable(facts, found) if (line := process_line(p)).split("  [")[0] not in shown]
    lines += [_node_line(node) for node in facts.nodes]
    lines += [f"network of {role}: {line}" for role, line in facts.networks.items()]
    if kills := _kills(facts):
        lines.append(f"the out-of-memory killer has ended {kills} process(es) on this node during the run")
    return [*lines, *facts.exit_reasons]


def _notable(facts: Facts, found: Diagnosis) -> list[ProcessFacts]:
    """Processes that are waited for, stopped, busy or waiting for a device."""
    waited = {call.worker for call in open_calls(facts)} | {found.blocked_by, DRIVER}
    odd = [p for p in facts.processes if p.worker in waited or p.state in ("T", "D", "Z") or p.cpu > 0.1]
    return odd[:16]


def _node_line(node: NodeFacts) -> str:
    if not node.alive or not node.reachable:
        return (
            f"node {node.name}: {'does not answer' if node.alive else 'dead'}; {', '.join(node.workers) or 'no worker'}"
        )
    parts = [f"load {node.load:.1f} on {node.cores} cores", f"memory {_gib(node.memory_free, node.memory_total)} free"]
    parts.append(f"/dev/shm {_gib(node.shm_free, node.shm_total)} free")
    parts += [
        f"{path} {_gib(free, total) if total >= 0 else 'does not answer:'} free" for path, free, total in node.disks
    ]
    return f"node {node.name}: {', '.join([*parts, *node.gpus])}"


def _gib(part: int, total: int) -> str:
    return f"{part / 2**30:.1f} of {total / 2**30:.1f} GiB"

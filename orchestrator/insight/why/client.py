"""The command's side of `troupe why`: asks the run, and examines it from outside if it does not answer."""

from __future__ import annotations

import shlex
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil

from troupe.orchestrator.cluster.inspection import InspectRequest, NodeFacts, inspect_node, node_facts
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.insight.event_texts import event_text
from troupe.orchestrator.insight.why.diagnosis import diagnose
from troupe.orchestrator.insight.why.facts import (
    ENDED,
    FOLDER,
    SNAPSHOT,
    DiagnosisReport,
    DriverSnapshot,
    DriverState,
    Facts,
)
from troupe.orchestrator.live.lock import LockHolder
from troupe.orchestrator.live.mailbox import Mailbox, require_folder
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.telemetry.timeline import DRIVER
from troupe.workers.telemetry.stacks import FOLDER as STACKS

_OUTSIDE_S = 4.0
"""Time that is left for a look from outside."""
_LAST_EVENTS = 3
_LONGEST_EVENT = 200
"""Characters of an event that are shown."""
_WRITE_S = 0.5
"""Longest wait until the request is written; it takes longer on a disk that hangs."""


def why(run_folder: Path, timeout_s: float) -> DiagnosisReport:
    """Why a run is slow, stuck or dead; of one that is about to start again, why it ended. Raises UsageError for no
    run, TroupeError for a silent driver elsewhere."""
    report, holder = _diagnosed(run_folder, timeout_s), LockHolder.of(run_folder)
    if holder is None or holder.pid == report.pid or not holder.is_active:
        return report
    again = f"{holder.waits or 'it is starting again'} (process {holder.pid}); before that, "
    return replace(report, diagnosis=replace(report.diagnosis, summary=again + report.diagnosis.summary))


def _diagnosed(run_folder: Path, timeout_s: float) -> DiagnosisReport:
    """See `why`."""
    began, folder = time.monotonic(), run_folder / FOLDER
    snapshot = SNAPSHOT.read(folder)
    if snapshot is None:
        require_folder(run_folder)
        raise UsageError(
            f"{run_folder}: no run has started here, or its folder {FOLDER} cannot be read; if a start failed, "
            "`troupe report` has its error"
        )
    if (
        ended := _last_report(folder, snapshot)
    ) is not None:  # its process may continue with another run: a later stage
        return ended
    process = snapshot.process() if snapshot.is_local else None
    stopped = process is not None and process.status() == psutil.STATUS_STOPPED
    if not stopped and (process is not None or not snapshot.is_local):
        answer = _ask(folder, max(1.0, timeout_s - _OUTSIDE_S - (time.monotonic() - began)))
        if answer is not None:
            return replace(answer, seconds=round(time.monotonic() - began, 2))
    if (ended := _last_report(folder, snapshot)) is not None:  # it ended while it was asked
        return replace(ended, seconds=round(time.monotonic() - began, 2))
    if not snapshot.is_local:
        raise TroupeError(
            f"{run_folder}: the driver (process {snapshot.pid} on {snapshot.host}) does not answer; "
            f"run `troupe why` on {snapshot.host}"
        )
    process = snapshot.process()
    state: DriverState = "dead" if process is None else "stopped" if stopped else "silent"
    diagnosis = diagnose(_from_outside(run_folder, snapshot, state))
    return DiagnosisReport(time.time(), snapshot.pid, diagnosis, round(time.monotonic() - began, 2))


def _last_report(folder: Path, snapshot: DriverSnapshot) -> DiagnosisReport | None:
    """The report of this snapshot's driver at the end of its run, or None if it wrote none. A new run deletes it."""
    ended = ENDED.read(folder)
    return ended if ended is not None and ended.pid == snapshot.pid else None


def _ask(folder: Path, timeout_s: float) -> DiagnosisReport | None:
    """The run's own answer; None if it does not answer in time."""
    try:
        return ENDED.decode(Mailbox(folder).ask(b"", timeout_s, _WRITE_S))
    except OSError:
        return None


def _from_outside(run_folder: Path, snapshot: DriverSnapshot, state: DriverState) -> Facts:
    """Facts from this machine about a run whose driver does not answer."""
    since = time.time() - snapshot.time
    known, paths = snapshot.facts, (run_folder,)
    driver = replace(known.driver, state=state, last_seen_s=since)
    if state == "dead":
        return replace(known, driver=driver, nodes=(node_facts(paths),), exit_reasons=_remains(run_folder, snapshot))
    logs = Path(snapshot.logs)
    request = InspectRequest({**snapshot.roots, snapshot.pid: DRIVER}, logs / STACKS, str(logs.parent), paths)
    report = inspect_node(request)
    calls = tuple(replace(call, age_s=call.age_s + since) for call in known.calls)
    run = replace(known.run, phase_s=known.run.phase_s + since, step_s=known.run.step_s + since)
    nodes: tuple[NodeFacts, ...] = (report.node,)
    return replace(known, run=run, driver=driver, calls=calls, processes=report.processes, nodes=nodes)


def _remains(run_folder: Path, snapshot: DriverSnapshot) -> tuple[str, ...]:
    """What is left of a run whose driver is dead: its last events, its workers' processes."""
    try:
        recorded = RunFolder(run_folder).events()[-_LAST_EVENTS:]
    except UsageError:  # it died before its first step
        recorded = []
    events = [f"step {event.get('step', '-')}: {event_text(event)}" for event in recorded]
    lines = [f"last event: {textwrap.shorten(event, _LONGEST_EVENT)}" for event in events]
    if remaining := [name for pid, name in snapshot.roots.items() if psutil.pid_exists(pid)]:
        lines.append(f"processes that are left: {', '.join(remaining)}")
    return tuple(lines)


def text_of(report: DiagnosisReport, run_folder: Path) -> str:
    """The report of a run as text, with the command that follows."""
    age, text = time.time() - report.time, report.diagnosis.text()
    if report.diagnosis.cause == "ended":
        return f"{text}\n  what it learned, or why it did not: `troupe report {shlex.quote(str(run_folder))}`"
    return f"{text}\n  (reported {age:.0f} s ago)" if age > 60 else text

"""Observes a run from a thread of its driver: answers `troupe why`, and reports slow or blocked calls automatically.

A thread, because the event loop may be what is stuck. It needs no answer from a worker: it knows every open call, and
what the kernel and the files of stacks say about the processes (`orchestrator/cluster/process_watch.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from troupe.orchestrator.cluster.inspection import ProcessFacts
from troupe.orchestrator.cluster.proc import out_of_memory_kills, started_at
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.stack_dumps import thread_at
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError
from troupe.orchestrator.insight.why.diagnosis import diagnose
from troupe.orchestrator.insight.why.facts import (
    ENDED,
    FOLDER,
    SNAPSHOT,
    Call,
    Diagnosis,
    DiagnosisReport,
    DriverFacts,
    DriverSnapshot,
    Facts,
    RunFacts,
    keep_report,
)
from troupe.orchestrator.insight.why.waiting import is_bounded, roles_behind
from troupe.orchestrator.live.mailbox import Mailbox
from troupe.orchestrator.live.run_state import run_state
from troupe.orchestrator.pools.engine import Queues
from troupe.orchestrator.roles.names import role_of, section_of
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.telemetry.timeline import DRIVER
from troupe.workers.telemetry.stacks import FOLDER as STACKS
from troupe.workers.telemetry.stacks import write_stacks_on_signal

logger = logging.getLogger(__name__)


_TICK_S = 0.5
_SNAPSHOT_S = 5.0
"""Interval at which the driver writes what it waits for, and looks for slow calls."""
_NODES_S = 2.0
"""Longest wait for what other nodes say."""
_BLOCKED_S = 2.0
"""The event loop counts as blocked if it has not run for this long."""
SHARE = 0.5
"""Share of a call's bound at which the run reports automatically."""
_TIMES = 5.0
_LEAST_S = 30.0
"""A step is reported automatically after so many times its median, and not before so many seconds."""
_PAUSE_S = 60.0
"""Shortest time between two automatic reports."""
_MOST_CALLS = 256
"""The oldest calls; thousands of engines have more."""
_STEPS = 20
"""Number of steps in the median."""


class RunObserver:
    """Observes one run until `close`. Created in the thread of the event loop."""

    def __init__(self, run_folder: Path, name: str, console: Console, cluster: Cluster) -> None:
        """Observes from now on; a folder that cannot be written costs the observer, not the run."""
        self.folder = run_folder / FOLDER
        self._queues: Callable[[], Queues] = Queues
        self._mailbox = Mailbox(self.folder)
        self._run_folder = run_folder
        self._name = name
        self._console = console
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._beat = time.monotonic()
        self._kills_before = out_of_memory_kills()
        self._closed = threading.Event()
        self._failed = False
        self._usual = (-1, 0.0)
        self._reported: set[object] = set()
        self._last_report = 0.0
        self._snapshot_at = 0.0
        self._thread = threading.Thread(target=self._observe, name="observer", daemon=True)
        self._start()

    def _start(self) -> None:
        """Starts the thread, with no files of an earlier run in the folder."""
        try:
            self._mailbox.open()
            (self.folder / ENDED.name).unlink(missing_ok=True)
            self._write_snapshot()
        except OSError as error:
            logger.warning("`troupe why` will not reach this run: %s", error)
            return
        write_stacks_on_signal(self._cluster.logs / STACKS)
        self._thread.start()

    def follow(self, queues: Callable[[], Queues]) -> None:
        """Reports the work that waits for engines from now on; `queues` is called in any thread."""
        self._queues = queues

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """An error that leaves the block is reported with all known facts, while the workers still exist."""
        try:
            yield
        except (StopRequested, UsageError):  # no fact about processes explains it
            raise
        except Exception as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Ends the thread; the last report contains how the run ended."""
        self._closed.set()
        if not self._thread.is_alive():
            return
        self._thread.join(_NODES_S)
        if self._failed:
            return
        try:
            ended = Diagnosis("ended", f"the run has {run_state(RunFolder(self._run_folder))}")
            ENDED.write(self.folder, DiagnosisReport(time.time(), os.getpid(), ended))
        except (TroupeError, OSError) as error:
            logger.debug("no last report: %s", error)

    def facts(self, error: str = "") -> Facts:
        """All that is known now; blocks for one to some seconds."""
        began, cluster = time.monotonic(), self._cluster
        self._ping()
        known = replace(self._known(), error=error)
        own = {os.getpid(): DRIVER}
        reports = cluster.inspect(own, (self._run_folder,), _NODES_S)
        late = time.monotonic() - self._beat
        blocked = late > _BLOCKED_S and self._beat < began and not error
        driver = replace(known.driver, state="blocked", blocked_s=late) if blocked else known.driver
        processes = tuple(_with_own_stacks(process) for report in reports for process in report.processes)
        words = tuple(self._exit_reasons(cluster, {p.pid for p in processes if p.state not in ("", "Z")}))
        nodes = tuple(report.node for report in reports)
        return replace(known, driver=driver, processes=processes, nodes=nodes, exit_reasons=words)

    def report(self, error: str = "") -> DiagnosisReport:
        began = time.monotonic()
        diagnosis = diagnose(self.facts(error))
        return DiagnosisReport(time.time(), os.getpid(), diagnosis, round(time.monotonic() - began, 2))

    def _known(self) -> Facts:
        """What needs no look at processes."""
        cluster, now, progress = self._cluster, time.time(), self._console.progress()
        calls = [c for c in cluster.calls.open_calls() if is_bounded(c.worker, c.method)]
        calls = calls[:_MOST_CALLS]
        run = RunFacts(
            self._name,
            progress.steps,
            progress.total,
            progress.phase,
            f"{progress.done}/{progress.parts}" if progress.parts > 1 else "",
            progress.phase_s,
            progress.step_s,
            self._usual_step(progress.steps),
        )
        waited = tuple(Call(c.worker, c.method, now - c.since, c.timeout_s, c.detail) for c in calls)
        names, roles = {call.worker for call in waited}, roles_behind(waited)
        workers = {n: p.pid for n, p in cluster.locations().items() if n in names or section_of(role_of(n)) in roles}
        return Facts(
            run,
            DriverFacts(os.getpid(), socket.gethostname()),
            waited,
            workers=workers,
            queues=self._queues(),
            kills_before=self._kills_before,
            networks=dict(cluster.events.networks),
        )

    def _observe(self) -> None:
        """Answers requests, and looks at what takes too long, until `close`; waits for nothing but its interval."""
        while not self._closed.wait(_TICK_S):
            try:
                self._ping()
                for request in self._mailbox.take():
                    self._mailbox.answer(request, ENDED.encode(self._examined()))
                if time.monotonic() - self._snapshot_at > _SNAPSHOT_S:
                    self._write_snapshot()
                    if (reason := self._too_long()) is not None:
                        self._report_itself(reason)
            except Exception as error:
                logger.debug("observing the run failed: %s: %s", type(error).__name__, error)

    def _examined(self) -> DiagnosisReport:
        """The current diagnosis, or what failed if it cannot be made."""
        try:
            return self.report()
        except Exception as problem:
            return _unexamined(problem)

    def _ping(self) -> None:
        """Asks the event loop for a sign of life."""
        try:
            self._loop.call_soon_threadsafe(self._note_beat)
        except RuntimeError:  # it is closed
            self._beat = time.monotonic()

    def _note_beat(self) -> None:
        self._beat = time.monotonic()

    def _too_long(self) -> object | None:
        """What has taken too long, if it has not been reported."""
        now, progress = time.time(), self._console.progress()
        if progress.phase == "close":  # the workers and Ray are ended on purpose
            return None
        usual = self._usual_step(progress.steps)
        late: list[object] = []
        started = progress.steps > 0  # a resumed run knows the usual step before it has started its workers
        if started and usual and progress.step_s > max(_LEAST_S, _TIMES * usual):
            late.append(("step", progress.steps))
        if time.monotonic() - self._beat > _LEAST_S:
            late.append(("blocked", self._beat))
        for call in self._cluster.calls.open_calls():
            if is_bounded(call.worker, call.method) and now - call.since > SHARE * call.timeout_s:
                late.append((call.worker, call.method, call.since))
        return next((reason for reason in late if reason not in self._reported), None)

    def _report_itself(self, reason: object) -> None:
        if time.monotonic() - self._last_report < _PAUSE_S and self._last_report:
            return
        self._last_report = time.monotonic()
        report = self.report()
        if report.diagnosis.cause != "running":  # otherwise it is looked at again after the pause
            self._reported.add(reason)
            path = keep_report(self.folder, report)
            logger.warning("%s (%s)", report.diagnosis.summary, path)
            events, detail = self._cluster.events, report.diagnosis.summary
            self._loop.call_soon_threadsafe(lambda: events.record("alarm", detail=detail))

    def _fail(self, error: Exception) -> None:
        """The last report of a run that ends with an error."""
        if not self._thread.is_alive():
            return
        self._failed = True
        text = _words(error) or type(error).__name__
        try:
            report = self.report(text)
        except Exception as problem:
            report = _unexamined(problem, text)
        try:
            ENDED.write(self.folder, report)  # first: the disk may be full
            keep_report(self.folder, report)
        except Exception as problem:
            logger.debug("no last report: %s: %s", type(problem).__name__, problem)

    def _write_snapshot(self) -> None:
        cluster = self._cluster
        roots = {p.pid: name for name, p in cluster.locations().items() if p.node == cluster.node}
        logs = str(cluster.logs)
        snapshot = DriverSnapshot(
            time.time(), socket.gethostname(), os.getpid(), started_at(os.getpid()), self._known(), logs, roots
        )
        SNAPSHOT.write(self.folder, snapshot)
        self._snapshot_at = time.monotonic()

    def _usual_step(self, steps: int) -> float:
        """Median duration of the last steps, read once for each step; 0 if there are fewer than three."""
        if self._usual[0] != steps:
            self._usual = (steps, _median_step(self._run_folder / "metrics.jsonl"))
        return self._usual[1]

    def _exit_reasons(self, cluster: Cluster, alive: set[int]) -> Iterator[str]:
        """The end of the logs of workers whose processes have ended."""
        for name, process in cluster.locations().items():
            if process.node == cluster.node and process.pid not in alive:
                words = cluster.exit_reason(process) or "its log is empty: it was killed (SIGKILL) or exited on its own"
                yield f"{name} (process {process.pid}) has ended; {words}"


def _words(error: Exception) -> str:
    """An error's text in one line of characters that JSON takes."""
    return " ".join(str(error).split()).encode(errors="replace").decode()


def _unexamined(problem: Exception, error: str = "") -> DiagnosisReport:
    """The report if a diagnosis fails: the error with which the run ends, if it does, and what failed."""
    failed = f"the diagnosis failed: {type(problem).__name__}: {_words(problem)}"
    found = Diagnosis("run_failed", f"the run failed: {error}; {failed}") if error else Diagnosis("unknown", failed)
    return DiagnosisReport(time.time(), os.getpid(), found)


def _with_own_stacks(process: ProcessFacts) -> ProcessFacts:
    """The driver's process with its stacks, which it reads itself: it sends itself no signal."""
    if process.pid != os.getpid() or process.threads or process.worker != DRIVER:
        return process
    main = threading.main_thread().ident
    stacks = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    return replace(process, threads=tuple(thread_at(frame) for _, frame in stacks))


def _median_step(metrics: Path) -> float:
    """Median of `seconds/step` of the last steps; 0 if there are fewer than three."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - 2**18))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return 0.0
    seconds = []
    for line in lines[-_STEPS - 1 :]:
        try:
            seconds.append(float(json.loads(line)["seconds/step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return statistics.median(seconds) if len(seconds) >= 3 else 0.0

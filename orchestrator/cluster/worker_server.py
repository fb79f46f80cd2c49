"""Server process from which the workers of a run on this machine are forked, started before Ray is even imported."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from troupe.orchestrator.cluster.proc import StoppedProcesses, exit_code, stat_fields
from troupe.orchestrator.cluster.ray_environment import LOCAL_SETTINGS, SETTINGS, TABLE_SETTINGS, cluster_to_join
from troupe.orchestrator.roles.settings import worker_env
from troupe.orchestrator.roles.table import settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.workers.contract.config import EngineProcess
from troupe.workers.isolation.interpreters import python_command
from troupe.workers.isolation.lifetime import remove_at_death
from troupe.workers.preload.forked_worker import EXIT_CODES, IMPORTS_S
from troupe.workers.telemetry.process_end import end_of_log, ended_by

logger = logging.getLogger(__name__)

_ENTRY = "troupe.workers.preload.server:serve"
_END_S = 5.0
_SAMPLE_S = 1.0
_ENDING_S = 0.5
"""Longest wait for the exit code of a worker whose connections have closed."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Signals that a process says nothing about: what it has written last is not the reason."""
_ahead: dict[EngineProcess, WorkerServer] = {}
"""The server that a command has started for its first run, until the run takes it."""


class WorkerServer:
    """A process that imports what workers import and forks them; it ends with this one. If it ends, stops or is
    silent, it is ended and named once, and workers start without it: another would share no memory with those
    that run."""

    def __init__(self, engine: EngineProcess, stopped_s: float = 5.0) -> None:
        """Start the process; it serves when its imports are done."""
        self.engine = engine
        self._folder = Path(tempfile.mkdtemp(prefix="troupe-"))
        remove_at_death(self._folder)
        self.path = str(self._folder / "workers")
        """Path of its socket, which accepts connections already."""
        self._errors = self._folder / "errors"
        theirs, self._owner = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, self._errors.open("w") as errors:
            listener.bind(self.path)
            listener.listen()
            self._process = subprocess.Popen(
                python_command(_ENTRY, str(listener.fileno()), str(theirs), engine.model_dump_json()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=SETTINGS | LOCAL_SETTINGS | os.environ | TABLE_SETTINGS | worker_env(engine.threads, "cpu"),
                pass_fds=(listener.fileno(), theirs),
                start_new_session=True,  # it does not receive the terminal's Ctrl-C
            )
        os.close(theirs)
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._follow, args=(stopped_s,), name="worker server", daemon=True)
        self._watch.start()

    def exit_code(self, pid: int) -> int | None:
        """Exit code of a worker that has ended, negative for a signal, or None; waits a moment for it."""
        deadline = time.monotonic() + _ENDING_S
        while (code := exit_code(pid)) is None and stat_fields(pid) and time.monotonic() < deadline:
            time.sleep(_ENDING_S / 100)
        return self._recorded(pid) if code is None else code

    def _recorded(self, pid: int) -> int | None:
        """The exit code that the process wrote before it reaped a worker, or None."""
        with suppress(OSError):
            for line in reversed((self._folder / EXIT_CODES).read_text().splitlines()):
                if line.split()[0] == str(pid):
                    return int(line.split()[1])
        return None

    def close(self) -> None:
        """End the process, but not the workers that it has forked."""
        self._closing.set()
        self._watch.join()
        os.close(self._owner)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _follow(self, stopped_s: float) -> None:
        """Watch the process and forks that start until it ends or is closed; consumes nothing, looks once a second."""
        stopped, why = StoppedProcesses(max(1, round(stopped_s / _SAMPLE_S))), ""
        while self._process.poll() is None and not self._closing.wait(_SAMPLE_S):
            found = stopped.sample(dict.fromkeys((self._process.pid, *self._starting()), False))
            for fork in set(found) - {self._process.pid}:
                logger.warning("a worker was stopped while it started, for %g s (failures.stopped_s): again", stopped_s)
                with suppress(ProcessLookupError):
                    os.kill(fork, signal.SIGKILL)  # the process that has asked for it becomes the worker
            if self._process.pid in found:
                why = f"was stopped for {stopped_s:g} s (failures.stopped_s)"
            elif not Path(self.path).exists():  # a worker that has waited for an answer removes it
                why = f"did not answer within {IMPORTS_S:g} s"
            if why:
                self._process.kill()
                self._process.wait()
        if code := self._process.poll():
            error = "" if code in _FROM_OUTSIDE else end_of_log(self._errors)
            why = why or f"has ended ({ended_by(code)}{error and f': {error}'})"
            logger.warning("the process that workers are forked from %s: they start without it, more slowly", why)

    def _starting(self) -> list[int]:
        """Forks that are no worker of Ray yet, which would have given them a title, and would watch them."""
        server = Path(f"/proc/{self._process.pid}")
        with suppress(OSError):
            forks = (server / "task" / server.name / "children").read_text().split()
            own = (server / "cmdline").read_bytes()
            return [int(fork) for fork in forks if Path(f"/proc/{fork}/cmdline").read_bytes() == own]
        return []


@contextmanager
def started_ahead(spec: RunSpec, address: str | None) -> Iterator[None]:
    """Start the server of a run that the block will start, as its imports take longer than all before the workers."""
    engine = _engine(spec, address)
    if engine is not None:
        _ahead[engine] = WorkerServer(engine, spec.failures.stopped_s)
    try:
        yield
    finally:
        if engine is not None and (unused := _ahead.pop(engine, None)) is not None:
            unused.close()


def server_of(spec: RunSpec, address: str | None = None) -> WorkerServer | None:
    """The server of a run, which closes it, or None if no engine runs on the CPU or a cluster is joined."""
    engine = _engine(spec, address)
    return None if engine is None else _ahead.pop(engine, None) or WorkerServer(engine, spec.failures.stopped_s)


def _engine(spec: RunSpec, address: str | None) -> EngineProcess | None:
    if cluster_to_join(address) is not None or "rollout" not in spec.roles.present():
        return None
    return settings_of(spec, "rollout").engine

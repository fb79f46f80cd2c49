"""Server process from which the workers of a run on this machine are forked, started before Ray is even imported."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from troupe.orchestrator.cluster.ray_environment import LOCAL_SETTINGS, SETTINGS, TABLE_SETTINGS, cluster_to_join
from troupe.orchestrator.roles.settings import worker_env
from troupe.orchestrator.roles.table import settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.workers.contract.config import EngineProcess
from troupe.workers.isolation.child import python_command
from troupe.workers.isolation.lifetime import remove_at_death

logger = logging.getLogger(__name__)

_ENTRY = "troupe.workers.preload.server:serve"
_END_S = 5.0
_ahead: dict[EngineProcess, WorkerServer] = {}
"""The server that a command has started for its first run, until the run takes it."""


class WorkerServer:
    """A process that imports what workers import and forks them. It ends with this process."""

    def __init__(self, engine: EngineProcess) -> None:
        """Start the process; it serves when its imports are done.

        Args:
            engine: The engine of the run, on the CPU.
        """
        self.engine = engine
        self._folder = tempfile.mkdtemp(prefix="troupe-")
        remove_at_death(self._folder)
        self.path = str(Path(self._folder) / "workers")
        """Path of its socket, which accepts connections already."""
        self._errors = Path(self._folder) / "errors"
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

    def close(self) -> None:
        """End the process, but not the workers that it has forked."""
        if self._process.poll():  # a worker that it does not fork starts all the same
            lines = self._errors.read_text(errors="replace").splitlines() or ["no message"]
            logger.warning("workers were not forked, and started more slowly: %s", lines[-1])
        os.close(self._owner)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def started_ahead(spec: RunSpec, address: str | None) -> Iterator[None]:
    """Start the server of a run that the block will start, as its imports take longer than all before the workers."""
    engine = _engine(spec, address)
    if engine is not None:
        _ahead[engine] = WorkerServer(engine)
    try:
        yield
    finally:
        if engine is not None and (unused := _ahead.pop(engine, None)) is not None:
            unused.close()


def server_of(spec: RunSpec, address: str | None = None) -> WorkerServer | None:
    """The server of a run, which closes it, or None if no engine runs on the CPU or a cluster is joined."""
    engine = _engine(spec, address)
    return None if engine is None else _ahead.pop(engine, None) or WorkerServer(engine)


def _engine(spec: RunSpec, address: str | None) -> EngineProcess | None:
    if cluster_to_join(address) is not None or "rollout" not in spec.roles.present():
        return None
    return settings_of(spec, "rollout").engine

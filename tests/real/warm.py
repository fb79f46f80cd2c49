"""`python -m tests.real.warm ARGUMENTS`: `troupe`, with an import server that is forked.

Each run would spend six CPU seconds on the same imports. Here one process for each process of the tests imports them,
and becomes the import server of every run in a fork; another one answers the probes of prompts (`warm_probes.py`). All
else is the command as a user types it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests import warm_probes
from troupe.__main__ import main
from troupe.orchestrator.signals import exit_on_signals
from troupe.workers.contract.config import EngineProcess

MARKER_VARIABLE = "TROUPE_TEST_RUN"
"""Environment variable that marks a command and everything that it starts."""
FAR_VARIABLE = "TROUPE_TEST_FAR"
"""Environment variable of commands whose engines are as on another host; unset or empty for others."""
_TEMPLATE = "TROUPE_TEST_TEMPLATE"
"""Environment variable with the path of the template's socket."""
_UNMARKED = "0" * 32
_CHUNK = 2**16


@cache
def template() -> dict[str, str]:
    """Start the process that imports, and return the environment of commands that use it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    path = warm_probes.start("tests.real.warm:serve_template", {**environment, MARKER_VARIABLE: _UNMARKED})
    return {_TEMPLATE: path, **warm_probes.server()}


def serve_template(listener: str, owner: str) -> None:
    """Import as an import server does, then fork one for every connection, until the owner has closed its pipe."""
    from troupe.workers.preload.server import import_ahead

    import_ahead(EngineProcess(device="cpu", threads=1, enforce_eager=True))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(listener)) as accepting:
        while int(owner) not in select.select([accepting, int(owner)], [], [])[0]:
            connection, _ = accepting.accept()
            with connection:
                data, descriptors, _, _ = socket.recv_fds(connection, _CHUNK, 3)
                while chunk := connection.recv(_CHUNK):
                    data += chunk
                if not (pid := os.fork()):
                    for own in (accepting.fileno(), int(owner), connection.fileno()):
                        os.close(own)
                    _become(json.loads(data), *descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.sendall(str(pid).encode())


def _become(request: dict[str, Any], listener: int, owner: int, errors: int) -> None:
    """Serve as the import server of a run, in a fork of the template."""
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for source, target in ((nothing, 0), (nothing, 1), (errors, 2)):
            os.dup2(source, target)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        environment: dict[str, str] = request["environment"]
        _mark(environment[MARKER_VARIABLE])
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        # Only what differs: resetting a variable hides the memory that holds the process title.
        os.environ |= dict(environment.items() - os.environ.items())
        sys.path[:] = json.loads(request["path"])
        module, function = request["entry"].split(":")
        vars(import_module(module))[function](str(listener), str(owner), request["engine"])
    finally:
        os._exit(1)


def _mark(mark: str) -> None:
    """Make the mark visible in the environment that the kernel shows of this process and of its forks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    place = ctypes.string_at(start, end - start).index(f"{MARKER_VARIABLE}={_UNMARKED}".encode())
    ctypes.memmove(start + place + len(MARKER_VARIABLE) + 1, mark.encode(), len(_UNMARKED))


class _Forked:
    """What the command knows of its import server, as `Popen` does of a child."""

    def __init__(self, command: list[str], *, stderr: IO[str], env: dict[str, str], pass_fds: tuple[int, int]) -> None:
        path, entry, _, _, engine = command[-5:]
        request = {"path": path, "entry": entry, "engine": engine, "environment": env}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[_TEMPLATE])
        data = json.dumps(request).encode()
        sent = socket.send_fds(self._connection, [data], [*pass_fds, stderr.fileno()])
        self._connection.sendall(data[sent:])
        self._connection.shutdown(socket.SHUT_WR)

    @cached_property
    def pid(self) -> int:
        with self._connection:
            return int(self._connection.recv(16))

    @cached_property
    def _ended(self) -> int:
        """Descriptor that is readable once the process has ended."""
        return os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._ended], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("import server", timeout or 0.0)
        return 0

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)


def _start(command: list[str], **options: Any) -> Any:
    engine = EngineProcess.model_validate_json(command[-1])
    if engine.device != "cpu" or not engine.enforce_eager:  # the template's imports have disabled compilation
        return subprocess.Popen(command, **options)
    return _Forked(command, **{name: options[name] for name in ("stderr", "env", "pass_fds")})


if __name__ == "__main__":
    exit_on_signals()
    from troupe.orchestrator.cluster import worker_server
    from troupe.orchestrator.roles.table import ROLES

    started: Any = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    worker_server.subprocess = started
    warm_probes.use()
    if os.environ.get(FAR_VARIABLE):
        ROLES["rollout"] = replace(ROLES["rollout"], worker="tests.pairs.far_engine:FarRolloutWorker")
    main()

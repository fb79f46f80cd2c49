"""Probes of prompts in forks of one process for each process of the tests: others spend two CPU seconds on its imports.

A command that tests start asks here what it would ask an interpreter of its own, with the same input and output. Probes
of a user's code start their own interpreter, as everywhere.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from troupe.workers.isolation import probe
from troupe.workers.isolation.interpreters import python_command
from troupe.workers.isolation.lifetime import remove_at_death

WARM = "troupe.workers.data.tokenizer_probe:measure"
_SOCKET = "TROUPE_TEST_PROBES"
"""Environment variable with the path of the server's socket."""
_CHUNK = 2**16
_KILLED = -signal.SIGKILL
_alive: list[int] = []
"""Ends of pipes that end the servers with this process."""


def start(entry: str, environment: dict[str, str]) -> str:
    """Start a process that ends with this one, and return the path of the socket at which it answers.

    Args:
        entry: `package.module:function`, which gets the descriptors of the listening socket and of its owner's pipe.
        environment: Its environment variables.
    """
    folder = Path(tempfile.mkdtemp(prefix="troupe-test-"))
    remove_at_death(folder)
    path = folder / "socket"
    theirs, ours = os.pipe()
    _alive.append(ours)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        subprocess.Popen(
            python_command(entry, str(listener.fileno()), str(theirs)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=(listener.fileno(), theirs),
            start_new_session=True,
        )
    os.close(theirs)
    return str(path)


@cache
def server() -> dict[str, str]:
    """Start the server, and return the environment of commands that use it."""
    silent = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}  # it would note on every start that it has no torch
    return {_SOCKET: start("tests.warm_probes:serve", silent)}


def use() -> None:
    """Answer the probes of this process, a command, in forks of the server, if the environment names one."""
    if os.environ.get(_SOCKET):
        patched: Any = probe
        patched.subprocess = _Processes


class _Processes:
    """What probes use of `subprocess`."""

    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def run(command: list[str], *, env: dict[str, str], input: str, timeout: float, **options: Any) -> Any:
        """As `subprocess.run` with text in pipes."""
        cwd, entry, _ = json.loads(input)
        if entry != WARM or command[0] != sys.executable:
            return subprocess.run(command, env=env, input=input, timeout=timeout, **options)
        request = {"path": json.loads(command[-2]), "environment": env, "cwd": cwd}
        with ExitStack() as files:
            given, out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            given.write(input)
            given.seek(0)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(os.environ[_SOCKET])
                data = json.dumps(request).encode()
                sent = socket.send_fds(connection, [data], [given.fileno(), out.fileno(), err.fileno()])
                connection.sendall(data[sent:])
                connection.shutdown(socket.SHUT_WR)
                ended = select.select([connection], [], [], timeout)[0]
                code = int(connection.recv(16) or _KILLED) if ended else 0
            out.seek(0)
            err.seek(0)
            if not ended:
                raise subprocess.TimeoutExpired(command, timeout, out.read().encode())
            return subprocess.CompletedProcess(command, code, out.read(), err.read())


def serve(listening: str, owner_pipe: str) -> None:
    """Fork a process for every connection, until the owner has closed its pipe."""
    listener, owner = int(listening), int(owner_pipe)
    vars(sys)["modules"]["torch"] = None  # as in a probe, which blocks its import
    for module in (WARM.partition(":")[0], "jinja2.sandbox", "transformers.models.auto.tokenization_auto"):
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=listener) as accepting:
        while owner not in select.select([accepting, owner], [], [])[0]:
            connection, _ = accepting.accept()
            with connection:
                data, descriptors, _, _ = socket.recv_fds(connection, _CHUNK, 3)
                while chunk := connection.recv(_CHUNK):
                    data += chunk
                if not os.fork():
                    for own in (accepting.fileno(), owner):
                        os.close(own)
                    _become(json.loads(data), descriptors, connection)
                for descriptor in descriptors:
                    os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> None:
    """Answer as the process that a probe starts, in a fork of the server, and send the exit code."""
    code = 1
    try:
        for target, source in enumerate(descriptors):
            os.dup2(source, target)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        sys.stdin = os.fdopen(0)
        try:
            probe.answer()
            code = 0
        except BaseException:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        connection.sendall(str(code).encode())
        os._exit(code)

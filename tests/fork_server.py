"""Processes of tests that import once, and are forked for every process that would import the same.

A fork gets the descriptors and the environment of the process that it stands for, and becomes it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from troupe.workers.isolation.interpreters import python_command
from troupe.workers.isolation.lifetime import remove_at_death

_CHUNK = 2**16
_CODE_BYTES = 2
_PID_BYTES = 4
_MOST_DESCRIPTORS = 3
_WITHOUT_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Environment in which imports start no threads, which a fork would not have."""
_alive: list[int] = []
"""Ends of pipes that end the servers with this process."""


def start(entry: str, environment: Mapping[str, str]) -> str:
    """Start a server that ends with this process, and return the path of the socket at which it answers.

    Args:
        entry: `package.module:function`, which gets the descriptors of the listening socket and of its owner's pipe,
            and calls `serve` with them.
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
            env={**environment, **_WITHOUT_THREADS},
            pass_fds=(listener.fileno(), theirs),
        )
    os.close(theirs)
    return str(path)


def serve(listening: str, owner_pipe: str, become: Callable[..., None], with_caller: bool = False) -> None:
    """Fork twice for every connection, until the owner has closed its pipe.

    Args:
        listening: Descriptor of the socket.
        owner_pipe: Descriptor of the pipe.
        become: Is called in the fork with the request and its descriptors. If it returns, the exit code is 0. The fork
            between it and this process waits for it, and sends its process id and its exit code.
        with_caller: Kill the fork if the process that has asked for it ends first: interrupted tests leave no runs.
    """
    listener, owner = int(listening), int(owner_pipe)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads cannot be forked")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection in a fork neither walks nor copies what all forks share
    with socket.socket(fileno=listener) as accepting:
        while owner not in select.select([accepting, owner], [], [])[0]:
            connection, _ = accepting.accept()
            with connection:
                data, descriptors, _, _ = socket.recv_fds(connection, _CHUNK, _MOST_DESCRIPTORS)
                while chunk := connection.recv(_CHUNK):
                    data += chunk
                if not os.fork():
                    os.close(accepting.fileno())
                    os.close(owner)
                    _answer(connection, become, json.loads(data), descriptors, with_caller)
                for descriptor in descriptors:
                    os.close(descriptor)


def _answer(
    connection: socket.socket,
    become: Callable[..., None],
    request: Mapping[str, Any],
    descriptors: Sequence[int],
    with_caller: bool,
) -> NoReturn:
    """Fork again, and tell the other end of the connection about the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (pid := os.fork()):
        connection.close()
        _run(become, request, descriptors)
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(pid.to_bytes(_PID_BYTES, "little"))
        if with_caller:
            _end_with_caller(connection, pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(code.to_bytes(_CODE_BYTES, "little", signed=True))
    finally:
        os._exit(0)


def _end_with_caller(connection: socket.socket, pid: int) -> None:
    """Wait for the end of a fork, or of the process at the other end of the connection, with which the fork ends."""
    caller = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PID_BYTES), sys.byteorder)
    fork = os.pidfd_open(pid)
    try:
        ended = select.select([fork, os.pidfd_open(caller)], [], [])[0]
    except ProcessLookupError:
        ended = []
    if fork not in ended:
        os.kill(pid, signal.SIGKILL)


def _run(become: Callable[..., None], request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """End as an interpreter does that has run this, but without the second in which it frees what all forks share."""
    code = 1
    try:
        become(request, *descriptors)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        shutdown, run_exit_functions = vars(threading)["_shutdown"], vars(atexit)["_run_exitfuncs"]
        shutdown()
        run_exit_functions()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def take_over(environment: Mapping[str, str], cwd: str, streams: Mapping[int, int]) -> None:
    """Give this process, a fork, the environment, the folder and the standard streams of the one that it becomes."""
    for target, source in streams.items():
        os.dup2(source, target)
    for source in set(streams.values()):
        os.close(source)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    # Only what differs: resetting a variable hides the memory that holds the process title.
    os.environ |= dict(environment.items() - os.environ.items())
    os.chdir(cwd)


class Forked:
    """A fork of a server: what the process that has asked for it knows of it, as `Popen` does of a child."""

    def __init__(self, path: str, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Ask the server at this path for a fork, which gets copies of the descriptors."""
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        data = json.dumps(request).encode()
        sent = socket.send_fds(self._connection, [data], descriptors) if descriptors else 0
        self._connection.sendall(data[sent:])
        self._connection.shutdown(socket.SHUT_WR)
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Its process id. The first time, waits until the server has imported."""
        if self._pid is None:
            answer = self._connection.recv(_PID_BYTES, socket.MSG_WAITALL)
            if len(answer) < _PID_BYTES:
                raise RuntimeError("the server of the tests that is forked has ended")
            self._pid = int.from_bytes(answer, "little")
        return self._pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        if self.returncode is None:
            pid = self.pid
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {pid}", timeout or 0.0)
            with self._connection:
                answer = self._connection.recv(_CODE_BYTES, socket.MSG_WAITALL)
            self.returncode = int.from_bytes(answer, "little", signed=True) if answer else -signal.SIGKILL
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

"""A process that imports what workers import, once, and forks the workers of a run from itself.

A run's command starts it first, so that the imports run while Ray starts. It has one thread: a lock that another thread
holds would stay locked in a fork. Ray's node starts `forked_worker.py`, which asks here for the fork that becomes the
worker.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from troupe.workers.contract.config import EngineProcess
from troupe.workers.contract.imports import without_collections
from troupe.workers.engine.process import (
    FRONT_END,
    IMPORTED_AHEAD,
    THREADS_VARIABLE,
    close_descriptors,
    fork_server,
    use_threads,
)
from troupe.workers.engine.settings import set_environment, set_import_environment
from troupe.workers.isolation.lifetime import exit_with_node
from troupe.workers.preload import forked_worker
from troupe.workers.preload.forked_worker import ENGINE_VARIABLE, EXIT_CODES, REPLY

_MODULES = (*IMPORTED_AHEAD, FRONT_END, "deepspeed", "pandas")
"""pyarrow imports pandas when it first makes an array, and pandas imports pyarrow."""
_WITHOUT_THREADS = {THREADS_VARIABLE: "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment in which imports start no threads: numpy starts as many as OpenMP has, and one of pyarrow's allocators,
which it does not use by default, one for itself. Each fork sets its number."""
_LOOK_S = 0.5
_ASK_S = 10.0
"""Longest wait for a request, which is sent at once."""
_MOST_ASKING = 64
"""Requests that arrive at the same time; another one takes the place of the oldest."""
_CHUNK = 2**16
_LARGEST = 2**24
"""Bytes of a request; Linux bounds arguments and environment to a few MiB."""
_STANDARD = (0, 1, 2)


@dataclass(frozen=True)
class _Request:
    """A worker to fork."""

    argv: Sequence[str]
    """Ray's script and its arguments."""
    environment: Mapping[str, str]
    folder: str


class _PendingFork:
    """A process that asks for a worker, and what has arrived of its request."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.descriptors: list[int] = []
        """Those of the worker's standard streams."""
        self._data = b""
        self._until = time.monotonic() + _ASK_S

    def fileno(self) -> int:
        return self.connection.fileno()

    def request(self) -> _Request | None:
        """The request once it is whole, else None. Raises OSError or ValueError if it is late or not a request."""
        if _user(self.connection) != os.getuid() or time.monotonic() > self._until or len(self._data) > _LARGEST:
            raise ValueError("not a request")
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self.connection, _CHUNK, len(_STANDARD))
        except BlockingIOError:
            return None
        self.descriptors += descriptors
        self._data += chunk
        return None if chunk else self._parsed()

    def _parsed(self) -> _Request:
        match json.loads(self._data):
            case {"argv": list(argv), "environment": dict(environment), "folder": str(folder)} if all(
                isinstance(text, str) for text in (*argv, *environment.values())
            ) and len(self.descriptors) == len(_STANDARD):
                return _Request(argv, environment, folder)
        raise ValueError("not a request")

    def close(self) -> None:
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def serve(listener: str, owner: str, engine: str) -> None:
    """Import, then fork a worker for every connection, until the owner's pipe closes. The arguments are the
    descriptors of listening socket and pipe, and an `EngineProcess` on the CPU as JSON."""
    faulthandler.enable(all_threads=False)  # in its forks, too
    with _ending_with(int(owner)):
        import_ahead(EngineProcess.model_validate_json(engine))
    if threads := len(os.listdir("/proc/self/task")) - 1:
        raise RuntimeError(f"a process with {threads} more threads cannot be forked")
    with socket.socket(fileno=int(listener)) as accepting:
        accepting.setblocking(False)
        _record_exit_codes(Path(accepting.getsockname()).with_name(EXIT_CODES))
        _answer(accepting, int(owner))
    os._exit(0)  # nothing to end in order, and thousands of modules to tear down


def import_ahead(engine: EngineProcess) -> None:
    """Import what workers with this engine on the CPU import, without a thread."""
    set_import_environment(engine)
    os.environ |= _WITHOUT_THREADS
    with _without_ray(), without_collections():
        for module in _MODULES:
            import_module(module)
        gc.freeze()  # a collection in a worker neither walks nor copies what all workers share


def _answer(accepting: socket.socket, owner: int) -> None:
    """Fork a worker for every request until the owner has closed its pipe. No process that asks makes others wait."""
    asking: list[_PendingFork] = []
    while owner not in (ready := select.select([accepting, owner, *asking], [], [], _LOOK_S if asking else None)[0]):
        if accepting in ready:
            with suppress(OSError):  # its process has ended since
                asking.append(_PendingFork(accepting.accept()[0]))
        for one in [*asking]:
            if len(asking) > _MOST_ASKING or _attend(one):
                asking.remove(one)
                one.close()


def _attend(one: _PendingFork) -> bool:
    """Receive more of a request and fork its worker once it is whole; returns whether nothing remains to be done."""
    try:
        if (request := one.request()) is None:
            return False
        _fork(request, one)
    except (OSError, ValueError, RecursionError):  # its process has ended since, or sent something else
        pass
    return True


def _record_exit_codes(path: Path) -> None:
    """From now on, write the exit code of every worker that ends to a file, and then reap it."""

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):  # there is none
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                with suppress(OSError), path.open("a") as file:
                    file.write(f"{ended.si_pid} {code}\n")
                os.waitpid(ended.si_pid, 0)

    signal.signal(signal.SIGCHLD, reap)


def _user(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)  # process, user, group


def _fork(request: _Request, asking: _PendingFork) -> None:
    """Forks the requested worker, unless nobody waits. The fork answers: if this process dies, there is a worker."""
    if not _is_waited_for(asking.connection):
        return
    if not os.fork():
        code = 1
        try:
            asking.connection.sendall(REPLY)
            _become(request, asking)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        forked_worker.serves()  # it ends for a reason: a worker without a fork would end, too
        os._exit(code)


def _is_waited_for(connection: socket.socket) -> bool:
    """Whether the other end, which sends no more, still receives."""
    polled = select.poll()
    polled.register(connection, 0)
    return not any(events & select.POLLHUP for _, events in polled.poll(0))


def _become(request: _Request, asking: _PendingFork) -> None:
    """Run Ray's script for workers in this fork. The connection is open until it serves: its end says it was killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ray may end a worker with its group
    for target, descriptor in zip(_STANDARD, asking.descriptors, strict=True):
        os.dup2(descriptor, target)
    close_descriptors(but=(asking.fileno(),))
    os.chdir(request.folder)
    for name in os.environ.keys() - request.environment.keys():
        del os.environ[name]
    # Only what differs: resetting a variable hides the memory that holds the process title.
    os.environ |= dict(request.environment.items() - os.environ.items())
    if engine := os.environ.pop(ENGINE_VARIABLE):
        set_environment(EngineProcess.model_validate_json(engine))
        fork_server()
    exit_with_node()
    use_threads()
    forked_worker.waiting.append(asking.connection)
    sys.argv = [*request.argv]
    runpy.run_path(request.argv[0], run_name="__main__")


@contextmanager
def _without_ray() -> Iterator[None]:
    """In the block Ray is not installed: it reads a worker's environment when it is imported, so each imports it."""
    modules: dict[str, Any] = sys.modules
    modules["ray"] = None  # this is how an import is blocked
    try:
        yield
    finally:
        del modules["ray"]


@contextmanager
def _ending_with(owner: int) -> Iterator[None]:
    """Exit when the owner closes its pipe. A timer looks, because a thread would prevent the forks."""

    def look(*_: object) -> None:
        if select.select([owner], [], [], 0)[0]:
            os._exit(1)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

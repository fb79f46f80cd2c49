"""The processes that environments run in, controlled by `troupe.workers.agents.environments.processes`.

The loading process imports the environment's class and then only forks episode processes, in each of which one episode
runs at a time. One that hangs or dies is killed alone, and its successor needs no import.

The loading process gets ``{"name", "args", "memory_limit_mib"}`` as one line of JSON over its socket, and answers
``{"ready": true, "pid", "threads"}`` (names of threads that the import started, which forks lack) or
``{"failure": why}``. After that, every byte on the socket comes with two descriptors for a new episode process: a
socket, and its output. On the socket it gets ``{"op": "start" | "step" | "close", ...}`` and answers
``{"observation"}`` or ``{"failure"}``, one line of JSON each.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from io import BufferedReader
from typing import Any

from troupe.workers.agents.environments.base import Environment, EnvironmentLoadError, load
from troupe.workers.contract.environments import Row, read_observation
from troupe.workers.isolation.descendants import MARK, end_with_parent
from troupe.workers.isolation.inside import connection, limit_memory
from troupe.workers.rewards.results import ErrorReplies
from troupe.workers.telemetry.stacks import write_stacks_on_signal


def main(control: str, owner_pipe: str) -> None:
    """Load the environment and fork an episode process for every request, until the socket closes. The arguments are
    the ones of `troupe.workers.isolation.child.Child`."""
    with connection(int(control), int(owner_pipe)) as parent:
        order = json.loads(_read_line(parent))
        try:
            create = load(order["name"], order["args"])
        except EnvironmentLoadError as error:
            parent.sendall(json.dumps({"failure": str(error)}).encode() + b"\n")
            return
        # The kernel reaps the forks. Not before: the import would learn no exit code of a process that it runs.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        parent.sendall(json.dumps({"ready": True, "pid": os.getpid(), "threads": threads}).encode() + b"\n")
        loading = os.getpid()
        while True:
            data, descriptors, _, _ = socket.recv_fds(parent, 1, 2)
            if not data:
                return
            requests = socket.socket(fileno=descriptors[0])
            if os.fork() == 0:
                parent.close()
                os.close(int(owner_pipe))
                for standard in (1, 2):
                    os.dup2(descriptors[1], standard)
                os.close(descriptors[1])
                end_with_parent(loading)
                _become_episode_process(requests, create, order["memory_limit_mib"])
            requests.close()
            os.close(descriptors[1])


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(2**16)
        if not chunk:
            os._exit(0)
        line += chunk
    return line


def _become_episode_process(
    connection: socket.socket, create: Callable[[], Environment], memory_limit_mib: int
) -> None:
    """Serve episodes in this forked process; does not return."""
    code, exhausted = 1, {"failure": f"out of memory (limit {memory_limit_mib} MiB)", "last": True}
    last = json.dumps(exhausted).encode() + b"\n"
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # processes that user code starts end with this group
        os.environ[MARK] += f".{os.getpid()}"  # identifies processes that leave the group
        write_stacks_on_signal()
        limit_memory(memory_limit_mib)
        connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        EpisodeHost(create).serve(connection)
        code = 0
    except MemoryError:
        with contextlib.suppress(OSError):
            connection.sendall(last)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _seed(seed: int) -> None:
    """Seed what user code may take random numbers from: all forks have the same state."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed % 2**63)


async def _readable(connection: socket.socket) -> None:
    """Wait until there is something to read, or the end."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)


class EpisodeHost:
    """Runs one episode after another."""

    def __init__(self, create: Callable[[], Environment]) -> None:
        self._create = create
        self._environment: Environment | None = None
        self._runner: asyncio.Runner | None = None
        self._errors = ErrorReplies()

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the connection closes. Raises MemoryError if user code used up its memory."""
        with connection.makefile("rb") as requests:
            while line := self._next(connection, requests):
                connection.sendall(self.answer(json.loads(line)).encode() + b"\n")

    def _next(self, connection: socket.socket, requests: BufferedReader) -> bytes:
        """The next request; meanwhile, what the environment has begun in its event loop continues."""
        if self._runner is not None:
            self._runner.run(_readable(connection))
        return requests.readline()

    def answer(self, request: dict[str, Any]) -> str:
        """The reply to one request, as JSON. Whatever user code raises but MemoryError becomes a failure."""
        try:
            return json.dumps(self._run(request))
        except MemoryError:
            raise
        except BaseException as error:
            return json.dumps({"failure": self._errors.describe(error)["failure"]})

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "close":
            environment, self._environment = self._environment, None
            closed = None if environment is None else environment.close()
            if inspect.isawaitable(closed):
                self._wait(closed)
            return {}
        if request["op"] == "start":
            row = request["row"]
            _seed(row["seed"])
            self._environment = self._create()
            returned = self._environment.start(Row(tuple(row["messages"]), row["answer"], row["metadata"], row["seed"]))
        else:
            if self._environment is None:
                raise RuntimeError("the episode was not started")
            returned = self._environment.step(request["message"])
        if inspect.isawaitable(returned):
            returned = self._wait(returned)
        return {"observation": asdict(read_observation(returned))}

    def _wait(self, awaitable: Any) -> Any:
        """Run to the end, always in the same event loop: clients that an environment keeps belong to it."""

        async def wait() -> Any:
            return await awaitable

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())

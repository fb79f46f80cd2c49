"""The command of a worker's interpreter instead of `python`: it has the worker forked from a server.

Ray's node runs it with Ray's script for workers and its arguments. Where the server is gone, or belongs to another
user, or the fork is killed before it serves, it runs the script itself: Ray would notice the last after a minute and a
half. Imports next to nothing: it is in the way of each worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress

SERVER_VARIABLE = "TROUPE_WORKER_SERVER"
"""Environment variable with the path of the server's socket (`server.py`)."""
ENGINE_VARIABLE = "TROUPE_WORKER_ENGINE"
"""Environment variable with the `EngineProcess` of the worker's engine as JSON; empty: it has none."""
REPLY = b"forked"
_IMPORTS_S = 40.0
"""Time for the server to finish its imports."""
_SERVES_S = 90.0
"""Time for the fork to become a worker, after which Ray starts another one."""
waiting: list[socket.socket] = []
"""In a fork: the connection to the process that waits until it serves."""


def main(arguments: list[str]) -> None:
    """Have the worker forked, or become it."""
    node = os.getppid()
    try:
        forked = _fork(arguments)
    except OSError as error:
        sys.stderr.write(f"the worker is not forked: {error}\n")
        forked = False
    if not forked and os.getppid() == node:  # otherwise Ray's node is gone, and its workers with it
        os.execv(sys.executable, [sys.executable, *arguments])


def serves() -> None:
    """In a fork that has become a worker: let the process end that would become it instead. Elsewhere does nothing."""
    while waiting:
        with waiting.pop() as connection, suppress(OSError):  # it has ended
            connection.sendall(REPLY)


def _fork(arguments: list[str]) -> bool:
    """Whether the server has forked the worker, when its imports are done, and the fork serves. Raises OSError."""
    request = {"argv": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_IMPORTS_S)
        connection.connect(os.environ[SERVER_VARIABLE])
        data = json.dumps(request).encode()
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(len(REPLY)) != REPLY:
            return False
        connection.settimeout(_SERVES_S)
        with suppress(TimeoutError):
            return connection.recv(len(REPLY)) == REPLY
        return True


if __name__ == "__main__":
    main(sys.argv[1:])

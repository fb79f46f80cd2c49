"""The command of a worker's interpreter instead of `python`: asks a server to fork the worker.

Ray's node runs it with Ray's script for workers and its arguments. Falls back to that script if the server is gone or
belongs to another user, or if the fork is killed before it serves: Ray would notice the last after a minute and a half.
Keep imports minimal: this runs before every worker.
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
"""Environment variable with the `EngineProcess` of the worker's engine as JSON; empty if it has none."""
REPLY = b"forked"
EXIT_CODES = "exit-codes"
"""File beside the socket with a line for each worker that has ended: its process id and exit code, negative for a
signal."""
IMPORTS_S = 40.0
"""Time for the server to finish its imports and answer."""
_SERVES_S = 90.0
"""Time for the fork to become a worker, after which Ray starts another one."""
waiting: list[socket.socket] = []
"""In a fork: the connection to the process that waits until it serves."""


def main(arguments: list[str]) -> None:
    """Asks the server to fork the worker, or becomes the worker."""
    try:
        forked = _fork(arguments)
    except OSError as error:
        if isinstance(error, TimeoutError):  # no other worker waits as long, and the server's watch sees it
            with suppress(OSError):
                os.unlink(os.environ[SERVER_VARIABLE])
        sys.stderr.write(f"the worker is not forked: {error}\n")
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, *arguments])


def serves() -> None:
    """Tells the waiting launcher that this fork serves, so that it exits. Does nothing outside a fork."""
    while waiting:
        with waiting.pop() as connection, suppress(OSError):  # it has ended
            connection.sendall(REPLY)


def _fork(arguments: list[str]) -> bool:
    """Asks the server to fork the worker; False if it or the fork ends before the fork serves. Raises OSError."""
    request = {"argv": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(IMPORTS_S)
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

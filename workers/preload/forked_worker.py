"""The command of a worker's interpreter instead of `python`: it has the worker forked from a server.

Ray's node runs it with Ray's script for workers and its arguments. Where the server is gone, or belongs to another
user, it runs the script itself. Imports next to nothing: it is in the way of each worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SERVER_VARIABLE = "TROUPE_WORKER_SERVER"
"""Environment variable with the path of the server's socket (`server.py`)."""
ENGINE_VARIABLE = "TROUPE_WORKER_ENGINE"
"""Environment variable with the `EngineProcess` of the worker's engine as JSON; empty: it has none."""
REPLY = b"forked"
_IMPORTS_S = 40.0
"""Time for the server to finish its imports. A cluster that is joined may give a worker up after 60 s."""


def main(arguments: list[str]) -> None:
    """Have the worker forked, or become it."""
    try:
        forked = _fork(arguments)
    except OSError as error:
        sys.stderr.write(f"the worker is not forked: {error}\n")
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, *arguments])


def _fork(arguments: list[str]) -> bool:
    """Whether the server has forked the worker; it answers when its imports are done. Raises OSError."""
    request = {"argv": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_IMPORTS_S)
        connection.connect(os.environ[SERVER_VARIABLE])
        data = json.dumps(request).encode()
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(len(REPLY)) == REPLY


if __name__ == "__main__":
    main(sys.argv[1:])

"""A server of workers that imports nothing, so that it serves at once."""

from __future__ import annotations

import os
import signal

from troupe.workers.preload import server


def serve(listener: str, owner: str, engine: str) -> None:
    """As `troupe.workers.preload.server:serve`."""
    for name, light in {"_MODULES": (), "use_threads": lambda: None, "fork_server": lambda: None}.items():
        setattr(server, name, light)
    server.serve(listener, owner, engine)


def serve_once(listener: str, owner: str, engine: str) -> None:
    """As `serve`, but it is killed at the moment when it has forked a worker."""
    fork = os.fork

    def fork_and_die() -> int:
        if child := fork():
            os.kill(os.getpid(), signal.SIGKILL)
        return child

    os.fork = fork_and_die
    serve(listener, owner, engine)

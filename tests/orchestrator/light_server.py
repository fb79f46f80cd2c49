"""A server of workers that imports nothing, so that it serves at once."""

from __future__ import annotations

from troupe.workers.preload import server


def serve(listener: str, owner: str, engine: str) -> None:
    """As `troupe.workers.preload.server:serve`."""
    for name, light in {"_MODULES": (), "use_threads": lambda: None, "fork_server": lambda: None}.items():
        setattr(server, name, light)
    server.serve(listener, owner, engine)

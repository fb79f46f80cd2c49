"""`troupe watch`: the report of an active run, live in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from troupe.orchestrator.commands.options import RunsArgument


def watch(
    run_folders: RunsArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 8300,
) -> None:
    """Serve the report of active runs in the browser and keep it current, until interrupted.

    Only this machine can open it, and it changes nothing. From another machine: ssh -L 8300:127.0.0.1:8300 HOST.
    """
    from troupe.orchestrator.insight.watch import WatchServer

    with WatchServer(run_folders, port) as server:
        typer.echo(f"watching {', '.join(map(str, run_folders))} at {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")

"""Nodes of Ray that only one test uses, as commands whose processes and output it sees."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.real.cluster_demo import answers, free_port
from tests.real.commands import Command, running
from tests.real.warm_nodes import ray_command

START_S = 90.0


@contextmanager
def ray_node(
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    within: tuple[str, ...] = (),
    forks: bool = False,
) -> Iterator[Command]:
    """A node; `within`: a command that starts the one that follows it; `forks`: its workers are forks."""
    # Ray creates sockets in its folder, and the path of a socket has a length limit.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        command = [*within, *ray_command(forks), "start", "--block", "--disable-usage-stats"]
        # Ports that Ray would fix, so that a node beside this one may hold them.
        command += [f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        with running(Command(folder, [*command, f"--temp-dir={scratch}", *arguments], dict(env or {}))) as started:
            yield started


@contextmanager
def ray_head(
    folder: Path, *arguments: str, port: int, env: Mapping[str, str] | None = None, forks: bool = False
) -> Iterator[tuple[str, Command]]:
    """A head node that accepts jobs; the URL of its job server, and the node."""
    dashboard = free_port()
    ports = (f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={free_port()}")
    with ray_node(folder, "--head", *ports, *arguments, env=env, forks=forks) as command:
        url = f"http://127.0.0.1:{dashboard}"
        command.wait_until(lambda: answers(url), "an answer of the job server", START_S)
        yield url, command

"""`troupe` in processes that start at once: forks of a process that has imported the command line and nothing heavy.

A command has its own process, as a user's has, without the second that the import of the command line takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests import fork_server, warm_probes
from tests.conftest import ROOT

HEAVY = ("ray", "torch", "vllm", "deepspeed")


@dataclass(frozen=True)
class Finished:
    """Outcome of a command."""

    returncode: int
    stdout: str
    stderr: str
    heavy: list[str]
    """Heavy libraries that the command imported."""


def run_command(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 120.0
) -> Finished:
    """Run `troupe` with these arguments in its own process.

    Args:
        arguments: Its arguments.
        env: Variables beside those of the test.
        cwd: Its working directory.
        timeout_s: After this the command is killed and the test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err, heavy = (Path(folder) / name for name in ("stdout", "stderr", "heavy"))
        request = {
            "arguments": arguments,
            "env": {**os.environ, **warm_probes.server(), **(env or {})},
            "cwd": str(cwd),
            "heavy": str(heavy),
        }
        with open(os.devnull) as nothing, out.open("w") as stdout, err.open("w") as stderr:
            descriptors = [file.fileno() for file in (nothing, stdout, stderr)]
            command = fork_server.Forked(_server(), request, descriptors)
        try:
            code = command.wait(timeout_s)
        except subprocess.TimeoutExpired:
            command.kill()
            code = command.wait()
        found = heavy.read_text().split() if heavy.exists() else []
        return Finished(code, out.read_text(), err.read_text(), found)


@cache
def _server() -> str:
    """Start the process that is forked, and return the path of its socket."""
    return fork_server.start(f"{__name__}:serve", os.environ)


def serve(listening: str, owner_pipe: str) -> None:
    """Import the command line, and fork a process for every command."""
    import reasoning_gym  # noqa: F401 (many commands read its tasks)

    import troupe.orchestrator.cluster.worker_server
    import troupe.orchestrator.commands.runs
    import troupe.orchestrator.insight.bench.points
    import troupe.orchestrator.starter.demo  # noqa: F401 (with these, all that commands import when they begin)
    from troupe.orchestrator.cli import COMMANDS, load

    for name, entry in COMMANDS.items():
        load(name, entry.home)
    fork_server.serve(listening, owner_pipe, _become, with_caller=True)


def _become(request: Mapping[str, Any], *streams: int) -> None:
    """Run the command in this process, a fork."""
    os.setsid()
    fork_server.take_over(request["env"], request["cwd"], dict(enumerate(streams)))
    sys.argv = ["troupe", *request["arguments"]]
    warm_probes.use()
    from troupe.__main__ import main

    try:
        main()
    finally:
        Path(request["heavy"]).write_text(" ".join(name for name in HEAVY if name in sys.modules))

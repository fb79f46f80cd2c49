"""`troupe` in processes that start at once: forks of a process that has imported the command line and nothing heavy.

A command has its own process, as a user's has, without the second that the import of the command line takes.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests import warm_probes
from tests.conftest import ROOT

HEAVY = ("ray", "torch", "vllm", "deepspeed")
POLL_S = 0.005


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
        files = {name: str(Path(folder) / name) for name in ("stdout", "stderr", "heavy")}
        request = {
            "arguments": arguments,
            "env": {**os.environ, **warm_probes.server(), **(env or {})},
            "cwd": str(cwd),
            "timeout_s": timeout_s,
        }
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request | {"files": files}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        stdout, stderr, heavy = (path.read_text() if (path := Path(file)).exists() else "" for file in files.values())
    return Finished(code, stdout, stderr, heavy.split())


@cache
def _server() -> subprocess.Popen[str]:
    """The process that is forked; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()


def _serve() -> None:
    """Fork a process for every request on standard input, and write its exit code."""
    import reasoning_gym  # noqa: F401 (many commands read its tasks)

    from troupe.orchestrator.cli import COMMANDS, load

    for name, entry in COMMANDS.items():
        load(name, entry.home)

    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request)
        deadline = time.monotonic() + request["timeout_s"]
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            time.sleep(POLL_S)
        print(os.waitstatus_to_exitcode(ended[1]), flush=True)


def _become(request: Mapping[str, Any]) -> NoReturn:
    """Run the command in this process, a fork."""
    code = 70
    try:
        for descriptor, name in ((0, os.devnull), (1, request["files"]["stdout"]), (2, request["files"]["stderr"])):
            opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = ["troupe", *request["arguments"]]
        warm_probes.use()
        from troupe.__main__ import main

        try:
            main()
        except SystemExit as end:
            code = 0 if end.code is None else int(end.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        Path(request["files"]["heavy"]).write_text(" ".join(name for name in HEAVY if name in sys.modules))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()

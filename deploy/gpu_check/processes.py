"""Runs a piece's commands, each in a separate process group and within a bound, and ends whatever they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_MARK = "TROUPE_GPU_CHECK"
"""Environment variable that marks a command and all that it starts. Ray's processes leave the process group."""
_GRACE_S = 20.0
"""Time for an orderly shutdown after SIGTERM."""
_LAST_LINES = 15


@dataclass(frozen=True)
class Ended:
    """How the commands of a piece ended."""

    seconds: float
    failure: str = ""
    """What went wrong; empty: every command exited with 0."""


def run_commands(commands: Sequence[Sequence[str]], bound_s: float, log: Path, cwd: Path) -> Ended:
    """Run commands of the Python interpreter one after another until one fails.

    Args:
        commands: Arguments of the interpreter.
        bound_s: Time for all of them together.
        log: File for their output, which is replaced.
        cwd: Working folder.
    """
    began, failure = time.monotonic(), ""
    with log.open("wb") as output:
        for command in commands:
            output.write(f"$ python {' '.join(command)}\n".encode())
            output.flush()
            left = bound_s - (time.monotonic() - began)
            with _started([sys.executable, *command], output.fileno(), cwd) as process:
                try:
                    code = process.wait(max(left, 0.0))
                    failure = f"`{' '.join(command[:3])}` exited with {code}" if code else ""
                except subprocess.TimeoutExpired:
                    failure = f"not done after {bound_s:g} s"
            if failure:
                break
    return Ended(time.monotonic() - began, failure)


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of a log that are not empty."""
    lines = (line.rstrip() for line in log.read_text(errors="replace").splitlines())
    return tuple([line for line in lines if line][-_LAST_LINES:])


@contextlib.contextmanager
def _started(command: Sequence[str], output: int, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session; at the end, it and all that it started have ended."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        _MARK: mark,
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # not reaped yet, so the id is still its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        left = list(_marked(mark))
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=10.0)
        process.wait()


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                yield process

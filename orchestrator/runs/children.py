"""Runs as child processes: each a `troupe` command in a separate process group, which saves if this process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from troupe.orchestrator.signals import SIGNALS_S
from troupe.workers.isolation.descendants import end_with_parent

STOP_S = 300.0
"""Timeout for runs that were asked to stop, until they are asked to exit at once."""
EXIT_S = 15.0
"""The same for these, until they are killed."""


def start_child(command: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start a process that gets SIGTERM, at which a run saves, when this one ends. Call it in the main thread.

    It has a separate group: a signal from the terminal reaches only this process. `output` takes what it prints.
    """
    saving = partial(end_with_parent, os.getpid(), signal.SIGTERM)
    return subprocess.Popen(
        command, env=os.environ.copy(), process_group=0, preexec_fn=saving, stdout=output, stderr=output
    )


def describe(code: int) -> str:
    """End of a process as text: `ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


class ChildCommand:
    """A `troupe` command in a child process that writes to a log."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """Start it; `log` is continued."""
        self._log = log
        with log.open("ab") as output:
            self._process = start_child([sys.executable, "-m", "troupe", *arguments], output)

    def ended(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to save and exit; if it was asked before, to exit at once."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill its process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_line(self) -> str:
        """The last line of the log that is not empty."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def stop_all(children: Sequence[ChildCommand]) -> None:
    """Stop children and wait: they save, exit at once after `STOP_S` or a second Ctrl-C, and are killed after `EXIT_S`
    more."""
    try:
        with suppress(KeyboardInterrupt):
            _stop(children, STOP_S)
        _stop(children, EXIT_S)
    finally:
        for child in children:
            child.kill()


def _stop(children: Sequence[ChildCommand], timeout_s: float) -> None:
    left = [child for child in children if child.ended() is None]
    for child in left:
        child.stop()
    until = time.monotonic() + timeout_s
    while any(child.ended() is None for child in left) and time.monotonic() < until:
        time.sleep(SIGNALS_S)

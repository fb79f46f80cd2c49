"""Runs where PID 1 reaps what lost its parent, and where it does not, as in a container without an init."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import command_line, descendants
from tests.real.commands import Run, Started

_NO_REAPER = """
import subprocess, sys, time
code = subprocess.Popen(sys.argv[2:], start_new_session=True).wait()
open(sys.argv[1], "w").write(f"{code}\\n")
time.sleep(10**6)
"""
"""A PID 1 as the program of a container often is: it waits for what it started, and not for what it inherits."""
_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Container:
    """Where a run is started."""

    reaps: bool
    """Whether its PID 1 waits for the processes that it inherits."""

    def __str__(self) -> str:
        return "init" if self.reaps else "no-init"

    def run(self, folder: Path, spec: Path, *overrides: str, **options: Any) -> Run:
        """Start `troupe run` there; the options are those of `Run`."""
        if self.reaps:
            return Run(folder, spec, *overrides, **options)
        if subprocess.run([*_NAMESPACE, "true"], check=False, capture_output=True).returncode:
            pytest.skip("needs the right to make a PID namespace")
        return UnreapedRun(folder, spec, *overrides, **options)


CONTAINERS = (Container(reaps=True), Container(reaps=False))


class Inside:
    """The process that PID 1 of a namespace started, with what `Run` needs of a `Popen`."""

    def __init__(self, outside: Started, code: Path) -> None:
        """`code`: the file to which PID 1 writes the exit code."""
        self._code = code
        self.init = _only_child(outside.pid)
        self.pid = _only_child(self.init.pid).pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        if self.returncode is None and self._code.is_file() and (text := self._code.read_text()).endswith("\n"):
            self.returncode = int(text)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(command_line(psutil.Process(self.pid)), timeout)
            time.sleep(0.05)
        return code

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal."""
        os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)


class UnreapedRun(Run):
    """`troupe run` in a PID namespace of its own, whose PID 1 reaps nothing but the command."""

    def __init__(self, folder: Path, spec: Path, *overrides: str, name: str, **options: Any) -> None:
        self._weights = f"troupe-{name}-*"
        code = folder / f"{name}-{time.monotonic_ns()}.code"
        within = (*_NAMESPACE, sys.executable, "-c", _NO_REAPER, str(code))
        super().__init__(folder, spec, *overrides, name=name, within=within, **options)
        self._outside = self.process
        self._inside = self.process = Inside(self._outside, code)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Running processes inside; PID 1 and what started it are no part of the run."""
        return [one for one in super().processes(name) if one.pid not in (self._outside.pid, self._inside.init.pid)]

    @property
    def stderr(self) -> str:
        """What the run wrote; `unshare` has a line of its own where PID 1 is killed."""
        return "".join(line for line in super().stderr.splitlines(keepends=True) if not line.startswith("unshare: "))

    @property
    def zombies(self) -> int:
        """Processes that have ended and that nobody waits for."""
        return len(self._inside.init.children(recursive=True)) - len(descendants(self._inside.init.pid))

    def kill(self) -> None:
        """End PID 1, and with it all processes inside; of a run that has not ended none is left that would clean up."""
        ended = self.process.poll() is not None
        self._inside.init.kill()
        self._outside.wait(10)
        for file in () if ended else Path("/dev/shm").glob(self._weights):
            file.unlink(missing_ok=True)


def _only_child(pid: int) -> psutil.Process:
    """The child of a process, once it is there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if children := psutil.Process(pid).children():
            return children[0]
        time.sleep(0.02)
    raise AssertionError(f"{command_line(psutil.Process(pid))} started nothing within {START_TIMEOUT_S:g} s")

"""A Ray head that is up before a benchmark, as on a cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.support.harness import NotCorrect
from benchmarks.support.processes import end

AUTH = {"RAY_AUTH_MODE": "token"}
"""Environment of a Ray head and of the runs that join it."""
_HEAD_S = 60.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Head:
    """A Ray head."""

    address: str
    process: psutil.Process


@contextmanager
def running_head() -> Iterator[Head]:
    """A Ray head on this machine, as an administrator starts it, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        arguments = ["start", "--head", "--block", f"--port={port}", "--include-dashboard=false", "--num-cpus=4"]
        with (Path(folder) / "output").open("w+") as output:
            process = psutil.Popen(
                [str(Path(sys.executable).with_name("ray")), *arguments, f"--temp-dir={folder}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | AUTH,
            )
            try:
                until = time.monotonic() + _HEAD_S
                while "Ray runtime started" not in (Path(folder) / "output").read_text():
                    if process.poll() is not None or time.monotonic() > until:
                        raise NotCorrect(f"no Ray head: {(Path(folder) / 'output').read_text()}")
                    time.sleep(_POLL_S)
                yield Head(f"127.0.0.1:{port}", process)
            finally:
                end([process])

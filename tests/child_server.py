"""The server that tests run in a child process. It has its own module so that the child imports it quickly."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import psutil


class Server:
    """An object that answers calls in the child process."""

    def __init__(self, start: int) -> None:
        self._value = start

    def add(self, amount: int) -> int:
        self._value += amount
        return self._value

    def niceness(self) -> int:
        return os.nice(0)

    def fail(self) -> None:
        raise KeyError("no such thing")

    def burn(self, seconds: float) -> None:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    def make_semaphore(self) -> Path:
        self._lock = multiprocessing.get_context("spawn").Lock()
        return Path("/dev/shm", "sem." + vars(self._lock)["_semlock"].name.removeprefix("/"))

    def leave_child(self) -> int:
        return psutil.Popen(["sleep", "1000"]).pid

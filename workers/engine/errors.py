"""Why a rollout worker's engine does not serve. vLLM's client learns only that it has died; the log has the reason."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

from troupe.workers.contract.messages import WorkerGone

_TAIL_BYTES = 1 << 16
_ERROR = re.compile(
    r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$"
    r"|^((?:CUDA|NCCL) error\b.*|Fatal Python error: .*|terminate called .*)$"
)
"""The last line of a traceback, behind whatever the logger puts before it, or what C++ and Python print before they end
a process."""
_CONSEQUENCES = ("EngineDeadError", "EngineGenerateError", "Engine core initialization failed", "; its log: ")
"""Errors that only refer to another one."""
_LONGEST = 300


class EngineClosed(RuntimeError):
    """The engine does not serve: it was not started, is closed, or its last weight update failed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} does not serve: {}".format(*self.args)


class EngineDead(WorkerGone):
    """The engine's process has ended; the worker must be replaced."""

    def __init__(self, name: str, fault: str = "", log: str = "") -> None:
        """`fault` is vLLM's last error, `log` its file; both are empty if unknown."""
        super().__init__(name, fault, log)

    @property
    def fault(self) -> str:
        """vLLM's last error."""
        return self.args[1]

    def __str__(self) -> str:
        name, fault, log = self.args
        words = f"the engine process of {name} has ended"
        words = f"{words}; vLLM's last error: {fault}" if fault else words
        return f"{words}; its log: {socket.gethostname()}:{log}" if log else words


class EngineOutOfStep(WorkerGone):
    """One of several processes of an engine failed in a call; the worker must be replaced.

    vLLM raises the first failure and leaves the answers of the processes after it in their queues. Later calls return
    their answers to the previous call, including the digests of an earlier update.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} must be replaced, because one of its engine's processes failed in a call: {}".format(*self.args)


def engine_dead(name: str) -> EngineDead:
    """The error for an engine whose process has ended, with the error in its log."""
    logs = own_logs()
    for log in logs:
        if fault := last_error(log):
            return EngineDead(name, fault, str(log))
    return EngineDead(name, "", str(logs[0])) if logs else EngineDead(name)


def own_logs() -> list[Path]:
    """The files that this process and its children write to: its standard output (vLLM's log) and error."""
    paths = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def last_error(log: Path) -> str:
    """The last error of a log that is not the consequence of another one; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = (match[1] or match[2] for line in reversed(lines) if (match := _ERROR.search(line)))
    return next((error for error in found if not any(words in error for words in _CONSEQUENCES)), "")[:_LONGEST]

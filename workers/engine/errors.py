"""Why a rollout worker's engine does not serve."""

from __future__ import annotations

import socket

from troupe.workers.contract.messages import WorkerGone
from troupe.workers.engine.log import last_error, own_logs


class EngineClosed(RuntimeError):
    """The engine does not serve: it was not started, is closed, or its last weight update failed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} does not serve: {}".format(*self.args)


class EngineDead(WorkerGone):
    """The engine's process has ended; the worker must be replaced."""

    def __init__(self, name: str, fault: str = "", log: str = "") -> None:
        """`fault` is vLLM's last error, `log` the file it stands in; empty where they are not known."""
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

    vLLM raises the first failure and leaves the answers of the processes after it in their queues. Later calls then get
    what these have answered to the call before, among it the digests of an earlier update.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} must be replaced, because one of its engine's processes failed in a call: {}".format(*self.args)


def engine_dead(name: str) -> EngineDead:
    """The error for an engine whose process has ended, with what the log says."""
    logs = own_logs()
    for log in logs:
        if fault := last_error(log):
            return EngineDead(name, fault, str(log))
    return EngineDead(name, "", str(logs[0])) if logs else EngineDead(name)

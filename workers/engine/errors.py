"""Why a rollout worker's engine does not serve. vLLM's client learns only that it has died; the log has the reason."""

from __future__ import annotations

import socket

from troupe.workers.contract.messages import WorkerGone
from troupe.workers.telemetry.process_end import last_error, last_lines, own_logs


class EngineClosed(RuntimeError):
    """The engine does not serve: it was not started, is closed, or its last weight update failed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} does not serve: {}".format(*self.args)


class EngineDead(WorkerGone):
    """The engine's process has ended; the worker must be replaced."""

    def __init__(self, name: str, fault: str = "", log: str = "", ended_by: str = "", last_lines: str = "") -> None:
        """What is known of the end; the rest is empty. `last_lines` is the end of the log if it has no error."""
        super().__init__(name, fault, log, ended_by, last_lines)

    @property
    def fault(self) -> str:
        """vLLM's last error."""
        return self.args[1]

    def __str__(self) -> str:
        name, fault, log, ended_by, last_lines = self.args
        words = [f"the engine process of {name} has ended{ended_by and f' ({ended_by})'}"]
        words += [f"vLLM's last error: {fault}"] if fault else []
        words += [f"its last lines: {last_lines}"] if last_lines else []
        return "; ".join([*words, f"its log: {socket.gethostname()}:{log}"] if log else words)


class EngineOutOfStep(WorkerGone):
    """One of an engine's processes failed in a call; the worker must be replaced: vLLM leaves the answers of the
    processes after it in their queues, and later calls return their answers to the previous one, digests
    included."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} must be replaced, because one of its engine's processes failed in a call: {}".format(*self.args)


def engine_dead(name: str, ended_by: str = "") -> EngineDead:
    """The error for an engine whose process has ended by this signal or exit code, with the error in its log."""
    logs = own_logs()
    for log in logs:
        if fault := last_error(log):
            return EngineDead(name, fault, str(log), ended_by)
    log, lines = next(((log, lines) for log in logs if (lines := last_lines(log))), (logs[0] if logs else "", ""))
    return EngineDead(name, "", str(log), ended_by, lines)

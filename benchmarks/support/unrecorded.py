"""`troupe` without what it records beyond metrics: calls, timelines and events. For `benchmarks.recording_cost`."""

from __future__ import annotations

from orchestrator.cli import main
from orchestrator.cluster.call_log import CallLog
from orchestrator.reporting.recorder import EventLog, RunRecorder


def _begin(self: CallLog, worker: str, method: str, timeout_s: float, detail: str = "") -> int:
    return 0


def _end(self: CallLog, call: int, status: str = "", detail: str = "") -> None:
    pass


def _record(self: EventLog, event: str, **fields: object) -> None:
    pass


async def _end_step(self: RunRecorder, step: int) -> None:
    pass


if __name__ == "__main__":
    CallLog.begin, CallLog.end = _begin, _end
    EventLog.record = _record
    RunRecorder.end_step = _end_step
    main()

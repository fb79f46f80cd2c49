"""A run of the product whose recording is switched on and off while it trains, for `benchmarks.recording_cost`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from orchestrator.cluster.call_log import CallLog
from orchestrator.replay.keeper import StepKeeper
from orchestrator.reporting.recorder import EventLog, RunRecorder
from orchestrator.reporting.timeline import OK
from orchestrator.rollouts.source import RolloutSource
from orchestrator.training.batch import Batch
from orchestrator.training.state import ControllerState
from workers.contract.config import PolicyConfig
from workers.contract.messages import RankPlan, UpdateMetrics
from workers.policy import PolicyWorker

_OFF = -1
"""Number of a call that is not recorded."""


def _marker(run_id: str) -> Path:
    """Exists while the run of this name records nothing: the workers see it too."""
    return Path(tempfile.gettempdir()) / f"{run_id}.unrecorded"


class SwitchedPolicy(PolicyWorker):
    """A policy worker that keeps what its updates computed while the run records."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(config, name)
        self._recorder = self._records

    def update(
        self, plan: RankPlan, batch: pa.Table, kl_old_coef: float = 0.0, texts: pa.Table | None = None
    ) -> UpdateMetrics:
        """See `PolicyWorker.update`."""
        self._records = None if _marker(self._config.run_id).exists() else self._recorder
        return super().update(plan, batch, kl_old_coef, texts)


class Switch:
    """Whether the run records what it does by default, besides `metrics.jsonl`."""

    def __init__(self, run_id: str, records: Callable[[int], bool]) -> None:
        """`records`: whether a step, counted from 1, is recorded."""
        self._path = _marker(run_id)
        self._records = records
        self.on = True

    def _set(self, on: bool) -> None:
        self.on = on
        if on:
            self._path.unlink(missing_ok=True)
        else:
            self._path.touch()

    @contextmanager
    def controls(self) -> Iterator[None]:
        """Within the block this switch decides for every run of this process."""
        record, keep = EventLog.record, StepKeeper.keep
        begin, end = CallLog.begin, CallLog.end
        save, end_step = RolloutSource.save_trajectories, RunRecorder.end_step

        def _record(log: EventLog, event: str, **fields: object) -> None:
            if self.on:
                record(log, event, **fields)

        def _begin(log: CallLog, worker: str, method: str, timeout_s: float, detail: str = "") -> int:
            return begin(log, worker, method, timeout_s, detail) if self.on else _OFF

        def _end(log: CallLog, call: int, status: str = OK, detail: str = "") -> None:
            if call != _OFF:
                end(log, call, status, detail)

        def _keep(
            keeper: StepKeeper, step: int, batch: Batch, state: ControllerState, updates: Sequence[Mapping[str, float]]
        ) -> None:
            if self.on:
                keep(keeper, step, batch, state, updates)

        async def _save(source: RolloutSource, version: int) -> None:
            if self.on:
                await save(source, version)

        async def _end_step(recorder: RunRecorder, step: int) -> None:
            if self.on:
                await end_step(recorder, step)
            self._set(self._records(step + 1))

        changes: list[tuple[type, str, Any]] = [
            (EventLog, "record", _record),
            (CallLog, "begin", _begin),
            (CallLog, "end", _end),
            (StepKeeper, "keep", _keep),
            (RolloutSource, "save_trajectories", _save),
            (RunRecorder, "end_step", _end_step),
        ]
        patches = [mock.patch.object(*change) for change in changes]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
            self._path.unlink(missing_ok=True)

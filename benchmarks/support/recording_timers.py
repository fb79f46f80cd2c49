"""CPU time of everything that a run records, taken where it is done: in the driver and in the workers."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.support.timing import Parts
from troupe.orchestrator.rollouts.source import RolloutSource
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.orchestrator.training import step_recorder
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.workers.contract.config import PolicyConfig
from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.messages import KeptFile, Unscored
from troupe.workers.contract.reward_config import RewardConfig
from troupe.workers.models.token_batch import TokenBatch
from troupe.workers.policy import PolicyWorker
from troupe.workers.reward import RewardWorker
from troupe.workers.training.meter import TokenRecorder


class LoopParts(Parts):
    """Parts of functions and of coroutines, which can be looked at in between."""

    @property
    def so_far(self) -> dict[str, float]:
        """The seconds by part, without resetting them."""
        return dict(self._seconds)

    def watch_coroutine(self, owner: Any, name: str, part: str) -> None:
        """As `watch`, for a coroutine function: the time that it keeps the event loop busy, without its waits."""
        function: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(self, part, function(*args, **kwargs))

        setattr(owner, name, wrapper)


class _Steps(Awaitable[Any]):
    """A coroutine that is timed from one wait to the next."""

    def __init__(self, parts: Parts, part: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._parts = parts
        self._part = part
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                with self._parts.timed(self._part):
                    wait = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            try:
                yield wait
            except BaseException as raised:
                error = raised


FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (CallLog, "begin", "calls"),
    (CallLog, "end", "calls"),
    (CallLog, "drain", "calls"),
    (EventLog, "record", "events"),
    (RunRecorder, "_write", "timeline"),
    (step_recorder, "_fresh", "replay"),
    (StepRecorder, "_publish", "replay"),
)
"""Functions of the driver that record, each with its owner and the part that it belongs to."""
COROUTINES: tuple[tuple[type, str, str], ...] = (
    (RunRecorder, "end_step", "timeline"),
    (RolloutSource, "_write_samples", "samples"),
    (StepRecorder, "_keep", "replay"),
)
"""Coroutine functions of the driver that record."""


def time_driver() -> LoopParts:
    """From now on everything that a driver in this process records is timed."""
    parts = LoopParts(time.thread_time)
    for owner, name, part in FUNCTIONS:
        parts.watch(owner, name, f"driver: {part}")
    for owner, name, part in COROUTINES:
        parts.watch_coroutine(owner, name, f"driver: {part}")
    return parts


def of_workers(run_id: str) -> dict[str, float]:
    """CPU seconds by part that the workers of a run have noted so far; of a role, those of all its workers."""
    total: defaultdict[str, float] = defaultdict(float)
    for path in folder_of(run_id).glob("*.json"):
        for part, seconds in json.loads(path.read_text()).items():
            total[part] += seconds
    return total


def folder_of(run_id: str) -> Path:
    """Where the workers of a run note their times."""
    return Path(tempfile.gettempdir()) / f"{run_id}.timers"


def _note(run_id: str, worker: str, watch: LoopParts) -> None:
    folder = folder_of(run_id)
    folder.mkdir(exist_ok=True)
    unfinished = folder / f".{worker}"
    unfinished.write_text(json.dumps(watch.so_far))
    unfinished.rename(folder / f"{worker}.json")


class _TimedRecorder(TokenRecorder):
    """A recorder of tokens that is timed."""

    def __init__(self, watch: LoopParts) -> None:
        super().__init__()
        self._watch = watch

    def note(self, batch: TokenBatch, logprobs: Any, entropy: Any) -> None:
        """See `TokenRecorder.note`."""
        with self._watch.timed("policy: samples"):
            super().note(batch, logprobs, entropy)

    def end_update(self, table: pa.Table) -> None:
        """See `TokenRecorder.end_update`."""
        with self._watch.timed("policy: samples"):
            super().end_update(table)


class TimedPolicy(PolicyWorker):
    """A policy worker whose recording is timed."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(config, name)
        self._watch = LoopParts(time.process_time)
        self._records = _TimedRecorder(self._watch)

    def token_records(self) -> tuple[int, pa.Table]:
        """See `PolicyWorker.token_records`."""
        with self._watch.timed("policy: samples"):
            return super().token_records()

    def digest(self) -> str:
        """See `PolicyWorker.digest`."""
        with self._watch.timed("policy: digest"):
            return super().digest()

    def keep_batch(
        self, folder: str, batch: pa.Table, texts: pa.Table | None = None, rows: Any = ()
    ) -> dict[str, KeptFile]:
        """See `PolicyWorker.keep_batch`."""
        with self._watch.timed("policy: replay"):
            kept = super().keep_batch(folder, batch, texts, rows)
        _note(self._config.run_id, self._name, self._watch)
        return kept


class TimedReward(RewardWorker):
    """A reward worker whose writing of samples is timed."""

    def __init__(self, config: RewardConfig, name: str, device: Device, policy: ModelConfig | None) -> None:
        super().__init__(config, name, device, policy)
        self._watch = LoopParts(time.process_time)

    def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: pa.Table) -> int:
        """See `RewardWorker.write_trajectories`."""
        with self._watch.timed("reward: samples"):
            rows = super().write_trajectories(path, step, unscored, *tables)
        _note(Path(path).parents[1].name, self.name, self._watch)  # the run folder has the name of the run
        return rows

"""CPU time of everything that a run records, taken where it is done: in the driver and in the workers."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import pyarrow as pa

from orchestrator.cluster.call_log import CallLog
from orchestrator.replay import keeper
from orchestrator.replay.keeper import StepKeeper
from orchestrator.reporting.recorder import EventLog, RunRecorder
from orchestrator.rollouts.source import RolloutSource
from workers.contract.config import Device, ModelConfig, PolicyConfig, RewardConfig
from workers.contract.messages import KeptFile
from workers.models.token_batch import TokenBatch
from workers.policy import PolicyWorker
from workers.reward import RewardWorker
from workers.training.token_records import TokenRecorder

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """CPU seconds by part."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: CPU time of the thread, or of a process that does one thing at a time."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Adds the CPU time of the block."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[part] += self._clock() - began

    def of_function(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.timing(part):
                return function(*args, **kwargs)

        return timed

    def of_coroutine(self, part: str, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Awaitable[R]]:
        """The coroutine function with the time that it keeps the event loop busy, without its waits."""

        @functools.wraps(function)
        async def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            return await _Steps(self, part, function(*args, **kwargs))

        return timed


class _Steps(Awaitable[R]):
    """A coroutine that is timed from one wait to the next."""

    def __init__(self, watch: Stopwatch, part: str, coroutine: Coroutine[Any, Any, R]) -> None:
        self._watch = watch
        self._part = part
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, R]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                with self._watch.timing(self._part):
                    wait = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            try:
                yield wait
            except BaseException as raised:
                error = raised


@contextmanager
def timed_driver() -> Iterator[Stopwatch]:
    """Within the block everything that a driver in this process records is timed."""
    watch = Stopwatch()
    functions: tuple[tuple[str, Any, str], ...] = (
        ("calls", CallLog, "begin"),
        ("calls", CallLog, "end"),
        ("calls", CallLog, "drain"),
        ("events", EventLog, "record"),
        ("timeline", RunRecorder, "_write"),
        ("replay", keeper, "_fresh"),
        ("replay", keeper, "_publish"),
    )
    coroutines: tuple[tuple[str, type, str], ...] = (
        ("timeline", RunRecorder, "end_step"),
        ("samples", RolloutSource, "_write_samples"),
        ("replay", StepKeeper, "_keep"),
    )
    with ExitStack() as stack:
        for part, owner, name in functions:
            timed = watch.of_function(f"driver: {part}", getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, timed))
        for part, owner, name in coroutines:
            timed = watch.of_coroutine(f"driver: {part}", getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, timed))
        yield watch


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


def _note(run_id: str, worker: str, watch: Stopwatch) -> None:
    folder = folder_of(run_id)
    folder.mkdir(exist_ok=True)
    unfinished = folder / f".{worker}"
    unfinished.write_text(json.dumps(watch.seconds))
    unfinished.rename(folder / f"{worker}.json")


class _TimedRecorder(TokenRecorder):
    """A recorder of tokens that is timed."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch

    def note(self, batch: TokenBatch, logprobs: Any, entropy: Any) -> None:
        """See `TokenRecorder.note`."""
        with self._watch.timing("policy: samples"):
            super().note(batch, logprobs, entropy)

    def end_update(self, table: pa.Table) -> None:
        """See `TokenRecorder.end_update`."""
        with self._watch.timing("policy: samples"):
            super().end_update(table)


class TimedPolicy(PolicyWorker):
    """A policy worker whose recording is timed."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(config, name)
        self._watch = Stopwatch(time.process_time)
        self._records = _TimedRecorder(self._watch)

    def token_records(self) -> tuple[int, pa.Table]:
        """See `PolicyWorker.token_records`."""
        with self._watch.timing("policy: samples"):
            return super().token_records()

    def digest(self) -> str:
        """See `PolicyWorker.digest`."""
        with self._watch.timing("policy: digest"):
            return super().digest()

    def keep_batch(
        self, folder: str, batch: pa.Table, texts: pa.Table | None = None, rows: Any = ()
    ) -> dict[str, KeptFile]:
        """See `PolicyWorker.keep_batch`."""
        with self._watch.timing("policy: replay"):
            kept = super().keep_batch(folder, batch, texts, rows)
        _note(self._config.run_id, self._name, self._watch)
        return kept


class TimedReward(RewardWorker):
    """A reward worker whose writing of samples is timed."""

    def __init__(self, config: RewardConfig, name: str, device: Device, policy: ModelConfig | None) -> None:
        super().__init__(config, name, device, policy)
        self._watch = Stopwatch(time.process_time)

    def write_trajectories(self, path: str, step: int, *tables: pa.Table) -> int:
        """See `RewardWorker.write_trajectories`."""
        with self._watch.timing("reward: samples"):
            rows = super().write_trajectories(path, step, *tables)
        _note(Path(path).parents[1].name, self.name, self._watch)  # the run folder has the name of the run
        return rows

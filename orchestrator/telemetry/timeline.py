"""The calls of a run: which are open, which have ended, and what every worker and the controller did when.

`ActorWorker` reports its calls to `CallLog`. What is open explains a run that waits; what has ended becomes the run's
timeline. A call costs two dict operations and two tuples.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from troupe.orchestrator.roles.names import is_worker, role_of
from troupe.workers.contract import roles

DRIVER = "driver-0"
"""The name under which the controller's own phases are recorded."""
OK = "ok"
"""Status of a call that returned."""
PHASES = (
    *("start", "generate", "score", "prepare", "update", "publish", "load", "sync", "evaluate", "checkpoint"),
    "other",
)
"""What a span can be. `sync` is the controller's: publish and load, as it waits for them."""
TIMELINE = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("worker", pa.string(), nullable=False),  # role and index; the controller is driver-0
        pa.field("phase", pa.string(), nullable=False),  # one of PHASES
        pa.field("method", pa.string(), nullable=False),  # of the worker; empty for the driver
        pa.field("start", pa.float64(), nullable=False),  # seconds since 1970
        pa.field("end", pa.float64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # ok, or the class of the error
        pa.field("detail", pa.string(), nullable=False),
    ]
)
"""Columns of `timeline/step-NNNNNN.parquet`: a row for each span that ended during the step."""
_METHODS: Mapping[str, tuple[Callable[..., object], ...]] = {
    "start": (
        *(roles.Replica.start, roles.Trainer.rendezvous, roles.Trainer.packs, roles.Reference.packs),
        *(roles.Policy.shares_prompts, roles.Policy.connect_engines),
        *(roles.RolloutEngine.connect_environments, roles.RolloutEngine.transfer_init, roles.Reward.connect_judge),
        roles.RolloutEngine.connect_reference,
    ),
    "generate": (roles.RolloutEngine.generate, roles.ReferenceSampler.complete),
    "score": (
        *(roles.Reward.score_groups, roles.Reward.score_references),
        *(roles.Policy.compute_logprobs, roles.Policy.reference_logprobs),
        *(roles.Policy.teacher_logprobs, roles.Critic.compute_values, roles.JudgeEngine.answer),
    ),
    "prepare": (
        *(roles.Policy.prepare, roles.Policy.cut_texts),
        *(roles.ExampleTrainer.tokenize, roles.ExampleTrainer.assemble, roles.ExampleTrainer.attach),
    ),
    "update": (
        *(roles.Policy.update, roles.Policy.store_distributions, roles.Policy.divergence),
        *(roles.Policy.shorten_step, roles.Policy.discard_stored, roles.Policy.token_records),
    ),
    "publish": (
        *(roles.Policy.publish_weights, roles.Policy.read_weights, roles.Policy.read_delta),
        roles.Policy.send_weights,
    ),
    "load": (
        *(roles.RolloutEngine.update_weights, roles.RolloutEngine.write_weights),
        roles.RolloutEngine.change_weights,
    ),
    "evaluate": (roles.ExampleTrainer.evaluate,),
    "checkpoint": (*(roles.Trainer.save, roles.Trainer.begin_save), *(roles.Trainer.load, roles.Trainer.export)),
}
_PHASE_OF = {method.__name__: phase for phase, methods in _METHODS.items() for method in methods}
_MOST_SPANS = 200_000
"""Ended calls that are kept until `drain`."""
_PROBES = frozenset({roles.Worker.health.__name__, roles.Watched.watch.__name__, roles.Trainer.save_status.__name__})
"""Methods whose successful calls are not kept: they ask, thousands of times, whether a worker lives or has written."""


class Span(NamedTuple):
    """A call that has ended."""

    worker: str
    """Role and index, as in `rollout-0`."""
    method: str
    """Method of the worker, or a phase of the controller if the worker is the driver."""
    start: float
    """Seconds since 1970."""
    end: float
    status: str
    """`ok`, or the class of the error."""
    detail: str


def phase_of(worker: str, method: str) -> str:
    """The phase of a call. The controller records its phases as methods of the driver."""
    if worker == DRIVER:
        return method if method in PHASES else "other"
    # What is no worker serves the start: the cluster that reserves resources, a node that downloads.
    return _PHASE_OF.get(method, "other") if is_worker(worker) else "start"


def timeline_table(step: int, spans: Iterable[Span]) -> pa.Table:
    rows = [
        (step, role_of(worker), worker, phase_of(worker, method), "" if worker == DRIVER else method, *rest)
        for worker, method, *rest in spans
    ]
    columns = zip(*rows, strict=True) if rows else ([] for _ in TIMELINE)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, TIMELINE, strict=True)]
    return pa.Table.from_arrays(arrays, schema=TIMELINE)


class OpenCall(NamedTuple):
    """A call that has not ended."""

    worker: str
    """Role and index, as in `rollout-0`."""
    method: str
    since: float
    """Seconds since 1970."""
    timeout_s: float
    """Bound on the call; 0 if it has none."""
    detail: str
    """What the call is about: a prompt_uid, `version 7`; may be empty."""


class CallLog:
    """The calls of one run. It belongs to the event loop of the controller and takes no lock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        # Plain tuples: named ones cost three times as much, and most of them are never looked at.
        self._open: dict[int, tuple[str, str, float, float, str]] = {}
        self._ended: deque[tuple[str, str, float, float, str, str]] = deque(maxlen=_MOST_SPANS)

    def begin(self, worker: str, method: str, timeout_s: float, detail: str = "") -> int:
        """Records the start of a call; returns its number, for `end`."""
        call = next(self._numbers)
        self._open[call] = (worker, method, self._clock(), timeout_s, detail)
        return call

    def end(self, call: int, status: str = OK, detail: str = "") -> None:
        """Records the end of a call. `detail`: what only its result contains; if empty, `begin`'s is kept."""
        worker, method, since, _, known = self._open.pop(call)
        if status != OK or method not in _PROBES:
            self._ended.append((worker, method, since, self._clock(), status, detail or known))

    @contextmanager
    def during(self, worker: str, method: str, timeout_s: float, detail: str = "") -> Iterator[None]:
        """Records the block as a call."""
        call = self.begin(worker, method, timeout_s, detail)
        try:
            yield
        except BaseException as error:
            self.end(call, type(error).__name__)
            raise
        self.end(call)

    def open_calls(self) -> list[OpenCall]:
        """The calls that have not ended, the oldest first. May be called from any thread."""
        return [OpenCall(*call) for call in list(self._open.values())]  # a copy: calls begin and end concurrently

    def drain(self) -> list[Span]:
        """The calls that have ended since the last `drain`, in order of their ends. Of more than `_MOST_SPANS`, the
        last ones."""
        spans = [Span(*call) for call in self._ended]
        self._ended.clear()
        return spans

"""The timeline of a run: what every worker and the controller did when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


_METHODS: Mapping[str, tuple[Callable[..., object], ...]] = {
    "start": (
        *(roles.Replica.start, roles.Trainer.rendezvous, roles.Trainer.packs, roles.Reference.packs),
        *(roles.Policy.shares_prompts, roles.Policy.connect_engines),
        *(roles.RolloutEngine.connect_environments, roles.RolloutEngine.transfer_init, roles.Reward.connect_judge),
    ),
    "generate": (roles.RolloutEngine.generate,),
    "score": (
        *(roles.Reward.score, roles.Policy.compute_logprobs, roles.Policy.reference_logprobs),
        *(roles.Critic.compute_values, roles.JudgeEngine.answer),
    ),
    "prepare": (
        *(roles.Policy.prepare, roles.Policy.cut_texts),
        *(roles.ExampleTrainer.tokenize, roles.ExampleTrainer.assemble, roles.ExampleTrainer.attach),
    ),
    "update": (
        *(roles.Policy.update, roles.Policy.hold_distributions, roles.Policy.divergence),
        *(roles.Policy.shorten_step, roles.Policy.release_held, roles.Policy.token_records),
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
    "checkpoint": (
        *(roles.Trainer.save, roles.Trainer.begin_save, roles.Trainer.load),
        *(roles.Trainer.export, roles.Trainer.export_average),
    ),
}
_PHASE_OF = {method.__name__: phase for phase, methods in _METHODS.items() for method in methods}


def phase_of(worker: str, method: str) -> str:
    """The phase of a call. The controller records its phases as methods of the driver."""
    if worker == DRIVER:
        return method if method in PHASES else "other"
    # What is no worker serves the start: the cluster that reserves resources, a node that downloads.
    return _PHASE_OF.get(method, "other") if is_worker(worker) else "start"


def timeline_table(step: int, spans: Iterable[Span]) -> pa.Table:
    """The spans as a TIMELINE table of a step."""
    rows = [
        (step, role_of(worker), worker, phase_of(worker, method), "" if worker == DRIVER else method, *rest)
        for worker, method, *rest in spans
    ]
    columns = zip(*rows, strict=True) if rows else ([] for _ in TIMELINE)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, TIMELINE, strict=True)]
    return pa.Table.from_arrays(arrays, schema=TIMELINE)

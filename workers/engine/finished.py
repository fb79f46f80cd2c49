"""Samples of a group that are finished while others still run, and groups that continue from such samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa

from troupe.workers.contract.messages import (
    IDENTITY_NAMES,
    ROLLOUTS,
    SEGMENT,
    FinishedSamples,
    GroupRequest,
    SampleSummary,
)

T = TypeVar("T")

Rows = list[dict[str, Any]]
"""Rows of the ROLLOUTS table."""


@dataclass(frozen=True, eq=False)
class RunningGroup(Generic[T]):
    """A group whose samples an engine generates."""

    request: GroupRequest
    tasks: Mapping[int, asyncio.Task[T]]
    """The task of each sample, by its index."""
    build: Callable[[int, T], tuple[SampleSummary, Rows]]
    """Summary and rows of a finished sample."""

    earlier: pa.Table | None = None
    """Rows of `request.finished`."""

    def finished(self) -> tuple[FinishedSamples, pa.Table]:
        """The samples that are finished now, including `request.finished`, and their ROLLOUTS table."""
        done = {i: task for i, task in self.tasks.items() if task.done() and not task.cancelled()}
        built = [self.build(i, task.result()) for i, task in done.items() if task.exception() is None]
        summaries = (*self.request.finished, *(summary for summary, _ in built))
        rows = [row for _, own in built for row in own]
        found = FinishedSamples(self.request.prompt_uid, self.request.attempt, summaries)
        return found, merged(self.request, self.earlier, rows)


def merged(request: GroupRequest, finished: pa.Table | None, rows: Rows) -> pa.Table:
    """The ROLLOUTS table of a whole group, in order of samples and segments.

    Args:
        request: Has the finished samples, and the attempt that all rows belong to.
        finished: Their rows, among other groups' rows, or None without any.
        rows: Rows of the other samples.

    Raises:
        ValueError: A finished sample has no rows.
    """
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    if finished is None:
        return table
    wanted = {sample.sample_index for sample in request.finished}
    keys = zip(finished["prompt_uid"].to_pylist(), finished["sample_index"].to_pylist(), strict=True)
    own = finished.filter(pa.array([uid == request.prompt_uid and index in wanted for uid, index in keys], pa.bool_()))
    if missing := wanted.difference(own["sample_index"].to_pylist()):
        raise ValueError(f"{request.prompt_uid}: no rows of the finished samples {sorted(missing)}")
    attempt = IDENTITY_NAMES.index("attempt")
    own = own.set_column(attempt, ROLLOUTS.field(attempt), pa.repeat(pa.scalar(request.attempt, pa.int32()), len(own)))
    whole = pa.concat_tables([own.cast(ROLLOUTS), table])
    places = list(zip(whole["sample_index"].to_pylist(), whole[SEGMENT.name].to_pylist(), strict=True))
    return whole.take(pa.array(sorted(range(len(places)), key=places.__getitem__), pa.int64()))

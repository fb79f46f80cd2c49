"""Batches of given examples, and held-out evaluation on such: what the loop is fed where nothing is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from orchestrator.batch_source import Batch, unless_stopped
from orchestrator.batching import plan_ranks, plan_units
from orchestrator.console import Console
from orchestrator.handles import Gang, TableRef
from orchestrator.ledger import Ledger
from orchestrator.metrics import PhaseTimers
from orchestrator.prompts import PromptPick, PromptSource
from workers.messages import TrainSummary
from workers.messages_offline import EvaluationPart, ExampleBatchSummary, add_tallies, figures


@dataclass(frozen=True)
class Tokenized:
    """A pool as the order of examples sees it."""

    rows: int
    """Examples that can be used."""
    digest: str
    """Of what the pool's rows say."""


@dataclass(frozen=True)
class Bounds:
    """How long calls may take."""

    train_timeout_s: float
    score_timeout_s: float


@dataclass(frozen=True)
class ReferenceScorer:
    """Who knows the reference's log-probs, and by which method."""

    gang: Gang
    method: str


class BatchMaker:
    """From picks to a batch: rows of tokens and, where the algorithm compares, the reference's log-probs."""

    def __init__(self, trainer: Gang, reference: ReferenceScorer | None, examples: TableRef, bounds: Bounds) -> None:
        self._trainer = trainer
        self._reference = reference
        self._examples = examples
        self._bounds = bounds

    async def make(self, picks: Sequence[PromptPick]) -> Batch:
        """The batch of these examples, in order."""
        worker, bound = self._trainer.workers[0], self._bounds.train_timeout_s
        named = tuple((pick.prompt_uid, pick.row) for pick in picks)
        summary: ExampleBatchSummary
        summary, table = await worker.call_for_table("assemble", named, self._examples, timeout_s=bound)
        if self._reference is not None:
            table = await self._with_reference(self._reference, summary, table)
        ends = accumulate(summary.members)
        units = tuple(tuple(range(end - rows, end)) for rows, end in zip(summary.members, ends, strict=True))
        return Batch(summary, table, units)

    async def _with_reference(self, reference: ReferenceScorer, summary: TrainSummary, table: TableRef) -> TableRef:
        gang, lengths = reference.gang, [row.tokens for row in summary.rows]
        plans = plan_ranks(lengths, range(len(lengths)), gang.ranks, gang.micro_batch_tokens)
        scored = await gang.scatter_for_tables(reference.method, plans, table, timeout_s=self._bounds.score_timeout_s)
        worker, bound = self._trainer.workers[0], self._bounds.train_timeout_s
        _, table = await worker.call_for_table("attach", table, *(part for _, part in scored), timeout_s=bound)
        return table


@dataclass(frozen=True)
class OfflineCast:
    """Who makes a batch of examples."""

    maker: BatchMaker
    order: PromptSource
    ledger: Ledger
    examples_per_step: int


class OfflineSource:
    """Given examples in the order of the seed, as a `BatchSource`."""

    def __init__(self, cast: OfflineCast, console: Console, stop: asyncio.Event) -> None:
        self._cast = cast
        self._console = console
        self._stop = stop
        self._state = cast.order.state()
        self._picks: Sequence[PromptPick] = ()
        self._tokens = 0

    def start(self) -> None:
        """Nothing to start: the data are there."""

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """The next examples of the order, with what the reference says of them."""
        with timers.phase("prepare"):
            self._console.phase("prepare", 0, 1)
            self._picks = [self._cast.order.next() for _ in range(self._cast.examples_per_step)]
            batch = await unless_stopped(self._stop, self._cast.maker.make(self._picks))
        self._tokens = sum(row.tokens for row in batch.summary.rows)
        return batch

    def trained(self, version: int) -> None:
        """Enter the examples in the books; only now does the saved order move on."""
        for pick in self._picks:
            self._cast.ledger.dispatch(pick.prompt_uid, pick.row, 1)
            self._cast.ledger.trained(pick.prompt_uid, 0)
        self._state = self._cast.order.state()

    def metrics(self, version: int, seconds: float) -> dict[str, float]:
        """Size and throughput."""
        return {
            "examples": float(len(self._picks)),
            "tokens": float(self._tokens),
            "tokens_per_s": self._tokens / seconds if seconds > 0 else 0.0,
            "epoch": float(self._state["epoch"]),
        }

    async def written(self, version: int) -> None:
        """Nothing to write: the examples are in the data already."""

    async def flush(self) -> None:
        """Nothing is being written."""

    def state(self) -> dict[str, Any]:
        """The order after the last trained batch."""
        return self._state

    async def probe(self) -> None:
        """Nobody but the trainers is there."""

    async def close(self) -> None:
        """Nothing is in flight."""


class ExampleEvaluator:
    """Loss and figures on held-out examples; the batch and the reference's word on it are made once."""

    def __init__(self, trainer: Gang, maker: BatchMaker, picks: Sequence[PromptPick], timeout_s: float) -> None:
        self._trainer = trainer
        self._maker = maker
        self._picks = tuple(picks)
        self._timeout_s = timeout_s
        self._batch: Batch | None = None

    async def run(self, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """`eval/loss` and its parts, `eval/accuracy` and whatever else the objective reports."""
        if progress is not None:
            progress(0, len(self._picks))
        batch = self._batch = self._batch or await self._maker.make(self._picks)
        gang = self._trainer
        plans = plan_units(batch.summary.rows, batch.units or (), gang.ranks, gang.micro_batch_tokens)
        parts: list[EvaluationPart] = await gang.scatter("evaluate", plans, batch.table, timeout_s=self._timeout_s)
        terms = {name: sum(part.terms[name] for part in parts) for name in parts[0].terms}
        found = terms | figures(add_tallies(part.tally for part in parts))
        return {"eval/examples": float(len(self._picks))} | {f"eval/{name}": value for name, value in found.items()}

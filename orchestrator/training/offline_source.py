"""Batches of offline data, and held-out evaluation on offline data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from troupe.orchestrator.cluster.worker_group import ExampleGroup, ScoreTokens, WorkerGroup
from troupe.orchestrator.data.mixture import epochs
from troupe.orchestrator.data.prompts import PromptOrder, PromptPick
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.sections import BaseSchedule
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.metrics import PhaseTimers
from troupe.orchestrator.training.batch import Batch, BatchSource, SourceSnapshot, plan_rows, unless_stopped
from troupe.orchestrator.training.checkpoint import Checkpoint
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.micro_batches import plan_units
from troupe.workers.contract.messages import TrainSummary
from troupe.workers.contract.offline_messages import add_tallies, tally_means
from troupe.workers.contract.roles import TableRef


@dataclass(frozen=True)
class Tokenized:
    """Size and digest of a tokenized pool, for the order of examples."""

    rows: int
    """Number of usable examples."""
    digest: str
    """Digest of the contents of the pool."""
    parts: Mapping[str, Tokenized] = field(default_factory=dict)
    """The sources of a mixture by name, in the order of their rows."""


@dataclass(frozen=True)
class ReferenceScorer:
    """The group that computes the reference's log-probs, and the method of it that does."""

    group: WorkerGroup[Any]
    score: ScoreTokens


class BatchMaker:
    """Assembles batches: token rows and, if the algorithm has a reference, its log-probs."""

    def __init__(
        self, trainer: ExampleGroup, reference: ReferenceScorer | None, examples: TableRef, schedule: BaseSchedule
    ) -> None:
        self._trainer = trainer
        self._reference = reference
        self._examples = examples
        self._schedule = schedule

    async def make(self, picks: Sequence[PromptPick]) -> Batch:
        """The batch of these examples, in order. Raises WorkerError."""
        named = tuple((pick.prompt_uid, pick.row) for pick in picks)
        timeout_s = self._schedule.train_timeout_s
        summary, table = await self._trainer.assemble(named, self._examples, timeout_s=timeout_s)
        if self._reference is not None:
            table = await self._with_reference(self._reference, summary, table)
        ends = accumulate(summary.members)
        units = tuple(tuple(range(end - rows, end)) for rows, end in zip(summary.members, ends, strict=True))
        return Batch(summary, table, units)

    async def _with_reference(self, reference: ReferenceScorer, summary: TrainSummary, table: TableRef) -> TableRef:
        """The batch's table with the reference's log-probs."""
        group, lengths = reference.group, [row.tokens for row in summary.rows]
        plans = plan_rows(lengths, group)
        scored = await reference.score(plans, table, timeout_s=self._schedule.score_timeout_s)
        for (uid, _), why in (one for summary, _ in scored for one in summary.failed.items()):
            raise TroupeError(f"{group.role}: {uid}: {why}")
        scores = (part for _, part in scored)
        return await self._trainer.attach(table, *scores, timeout_s=self._schedule.train_timeout_s)


@dataclass(frozen=True)
class OfflineComponents:
    """The parts that produce a batch of examples."""

    maker: BatchMaker
    order: PromptOrder
    ledger: Ledger
    examples_per_step: int


class OfflineSource(BatchSource):
    """Batches of offline data: takes examples in the order of the seed."""

    def __init__(self, components: OfflineComponents, console: Console, stop: asyncio.Event) -> None:
        self._components = components
        self._console = console
        self._stop = stop
        self._state = components.order.state()
        self._picks: Sequence[PromptPick] = ()
        self._tokens = 0

    async def restore(self, found: Checkpoint) -> int:
        with found.restoring():
            self._components.order.restore(found.state["source"])
        self._state = self._components.order.state()
        return 0

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """Assembles the next examples and waits for the reference's log-probs; unblocked by the workers or a stop."""
        with timers.phase("prepare"):
            self._console.phase("prepare")
            self._picks = [self._components.order.next() for _ in range(self._components.examples_per_step)]
            batch = await unless_stopped(self._stop, self._components.maker.make(self._picks))
        self._tokens = sum(row.tokens for row in batch.summary.rows)
        return batch

    def mark_trained(self, version: int) -> None:
        """Records the examples in the ledger as trained; only then does the saved order advance."""
        for pick in self._picks:
            self._components.ledger.dispatch(pick.prompt_uid, pick.row, pick.draw, 1)
            self._components.ledger.mark_trained(pick.prompt_uid, 0)
        self._state = self._components.order.state()

    def metrics(self, version: int, seconds: float) -> dict[str, float]:
        """Number of examples and tokens, throughput (tokens/s over `seconds`), epoch."""
        return {
            "examples": float(len(self._picks)),
            "tokens": float(self._tokens),
            "tokens_per_s": self._tokens / seconds if seconds > 0 else 0.0,
            **self._source_metrics(),
        }

    def _source_metrics(self) -> dict[str, float]:
        """Finished passes over the data: over each source of a mixture, whose share of the batch is reported too."""
        passes = epochs(self._state)
        metrics = {"epoch": float(min(passes.values()))}
        for name in passes if "" not in passes else ():
            own = sum(pick.prompt_uid.rsplit("-", 2)[0] == name for pick in self._picks)
            metrics |= {f"source/{name}/share": own / len(self._picks), f"source/{name}/epoch": float(passes[name])}
        return metrics

    async def snapshot(self) -> SourceSnapshot:
        """The order of examples after the last trained batch."""
        return SourceSnapshot(self._state, self._components.ledger.state())


class ExampleEvaluator:
    """Evaluates loss and metrics on held-out examples; assembles the batch and the reference's log-probs only once."""

    def __init__(self, trainer: ExampleGroup, maker: BatchMaker, picks: Sequence[PromptPick], timeout_s: float) -> None:
        self._trainer = trainer
        self._maker = maker
        self._picks = tuple(picks)
        self._timeout_s = timeout_s
        self._batch: Batch | None = None

    async def run(self, step: int, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """`eval/loss` with its terms and the objective's other metrics of the current weights. `progress` is called
        with (0, number of examples) at the start. Raises WorkerError."""
        if progress is not None:
            progress(0, len(self._picks))
        batch = self._batch = self._batch or await self._maker.make(self._picks)
        trainer = self._trainer
        plans = plan_units(
            batch.summary.rows,
            batch.units or (),
            trainer.data_parallel_size,
            trainer.micro_batch_tokens,
            packed=trainer.packs,
        )
        parts = await trainer.evaluate(plans, batch.table, timeout_s=self._timeout_s)
        terms = {name: sum(part.terms[name] for part in parts) for name in parts[0].terms}
        metrics = terms | tally_means(add_tallies(part.tally for part in parts))
        return {"eval/examples": float(len(self._picks))} | {f"eval/{name}": value for name, value in metrics.items()}

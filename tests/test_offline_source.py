"""The loop on given examples, against fakes: the order, the books, resumption, evaluation, pairs kept together."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.batching import plan_units
from orchestrator.checkpoint import CheckpointStore
from orchestrator.console import Console
from orchestrator.controller import Cast, Controller, RunOutcome, TrainPlan
from orchestrator.handles import Gang
from orchestrator.ledger import Ledger
from orchestrator.metrics import MetricSinks
from orchestrator.offline_source import (
    BatchMaker,
    Bounds,
    ExampleEvaluator,
    OfflineCast,
    OfflineSource,
    ReferenceScorer,
    Tokenized,
)
from orchestrator.prompts import PromptSource, evaluation_picks
from tests.fakes import PLAN as ROLLOUT_PLAN
from tests.fakes import FakeHandle
from workers.messages import RankPlan, TrainRow, UpdateMetrics
from workers.messages_offline import EvaluationPart, ExampleBatchSummary

EXAMPLES = 10
PLAN = replace(
    ROLLOUT_PLAN,
    steps=5,
    skip_silent=False,
    probe_every_s=60.0,
    checkpoint_every=0,
    evaluate_every=2,
    evaluate_at_start=True,
    evaluate_at_end=True,
)

Picks = tuple[tuple[str, int], ...]


@dataclass
class FakeTrainer:
    """Trains pairs by noting them."""

    trained: list[Picks] = field(default_factory=list)
    plans: list[RankPlan] = field(default_factory=list)
    referenced: list[str] = field(default_factory=list)

    async def assemble(self, picks: Picks, examples: object) -> tuple[ExampleBatchSummary, Picks]:
        rows = tuple(TrainRow(10 + place, 4, True) for _, place in picks for _ in range(2))
        return ExampleBatchSummary(rows, members=(2,) * len(picks)), picks

    async def reference_logprobs(self, plan: RankPlan, batch: Picks) -> tuple[int, str]:
        return 0, f"{len(batch)} scored"

    async def attach(self, batch: Picks, *scores: str) -> tuple[int, Picks]:
        self.referenced += scores
        return len(batch), batch

    async def update(self, plan: RankPlan, batch: Picks) -> UpdateMetrics:
        self.plans.append(plan)
        self.trained.append(batch)
        return UpdateMetrics({"loss": 0.25}, {"grad_norm": 1.0})

    async def evaluate(self, plan: RankPlan, batch: Picks) -> EvaluationPart:
        return EvaluationPart({"loss": 0.5}, {"accuracy": (3.0, 4.0)})

    async def save(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "rank").write_text("0")

    async def export(self, directory: str) -> None:
        await self.save(directory)


class Theatre:
    """A controller on given examples with everything around it."""

    def __init__(self, out: Path, plan: TrainPlan = PLAN, ranks: int = 1, resume: bool = False) -> None:
        self.trainers = [FakeTrainer() for _ in range(ranks)]
        self.plan, self.out, self.resume = plan, out, resume

    def build(self) -> Controller:
        """Made inside the running loop."""
        store = CheckpointStore(self.out / "checkpoints", 2)
        store.prepare()
        found = store.latest() if self.resume else None
        done = found.step if found else 0
        self.order = PromptSource(Tokenized(EXAMPLES, "d"), 17)
        if found is not None:
            self.order.restore(found.state["source"])
        ledger = Ledger.restore(found.state["ledger"]) if found else Ledger()
        gang = Gang("policy", [FakeHandle(f"policy-{n}", t) for n, t in enumerate(self.trainers)], 256)
        maker = BatchMaker(gang, ReferenceScorer(gang, "reference_logprobs"), "table", Bounds(5.0, 5.0))
        self.stop = asyncio.Event()
        console = Console(io.StringIO())
        picks = evaluation_picks(Tokenized(4, "e"), 17)
        cast = Cast(
            policy=gang,
            critic=None,
            source=OfflineSource(OfflineCast(maker, self.order, ledger, 4), console, self.stop),
            sync=None,
            evaluator=ExampleEvaluator(gang, maker, picks, 5.0),
            ledger=ledger,
        )
        sinks = MetricSinks.open(self.out, tensorboard=False, resume_at=done)
        return Controller(self.plan, cast, store, sinks, console, self.stop, done)

    def run(self) -> RunOutcome:
        """The whole run."""

        async def go() -> RunOutcome:
            return await self.build().run()

        return asyncio.run(go())

    @property
    def seen(self) -> list[int]:
        """Examples in the order they were trained on."""
        return [number for batch in self.trainers[0].trained for _, number in batch]

    def lines(self) -> list[dict[str, float]]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


def test_every_epoch_sees_every_example_once_and_the_books_say_so(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path)
    outcome = theatre.run()
    assert sorted(theatre.seen[:EXAMPLES]) == sorted(theatre.seen[EXAMPLES:]) == list(range(EXAMPLES))
    assert theatre.seen[:EXAMPLES] != theatre.seen[EXAMPLES:]
    assert outcome.ledger == {"dispatched": 20, "trained": 20, "dropped": 0, "in_flight": 0, "retries": 0}
    assert [line["step"] for line in theatre.lines()] == [0, 1, 2, 3, 4, 5]
    assert "sync" not in theatre.lines()[-1]
    assert set(theatre.trainers[0].referenced) == {"4 scored"}


def test_held_out_figures_come_at_start_between_and_at_end(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path)
    outcome = theatre.run()
    assert outcome.first_eval == outcome.last_eval == {"eval/examples": 4.0, "eval/loss": 0.5, "eval/accuracy": 0.75}
    assert [line["step"] for line in theatre.lines() if "eval/loss" in line] == [0, 2, 4, 5]
    assert len(theatre.trainers[0].referenced) == 5 + 1  # the held-out batch is scored once


def test_a_stopped_run_goes_on_with_the_very_next_example(tmp_path: Path) -> None:
    whole = Theatre(tmp_path / "whole")
    whole.run()
    first = Theatre(tmp_path / "parts")

    async def stopped() -> RunOutcome:
        controller = first.build()

        async def stop_after_two() -> None:
            while controller.version < 2:
                await asyncio.sleep(0)
            first.stop.set()

        stopper = asyncio.create_task(stop_after_two())
        outcome = await controller.run()
        await stopper
        return outcome

    outcome = asyncio.run(stopped())
    assert outcome.stopped
    second = Theatre(tmp_path / "parts", resume=True)
    assert second.run().ledger["trained"] == 20
    assert first.seen + second.seen == whole.seen
    assert [line["step"] for line in second.lines()] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_stay_together_whatever_the_minibatches_and_ranks(tmp_path: Path, ranks: int) -> None:
    theatre = Theatre(tmp_path, replace(PLAN, steps=1, epochs=2, minibatches=2), ranks=ranks)
    theatre.run()
    plans = [plan for trainer in theatre.trainers for plan in trainer.plans]
    rows = [row for plan in plans for batch in plan.micro_batches for row in batch]
    assert sorted(rows) == sorted([*range(8), *range(8)])
    for plan in plans:
        assert plan.total_sequences == 2
        for batch in plan.micro_batches:
            assert all(row ^ 1 in batch for row in batch)


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(240, 600),
)
def test_units_are_planned_once_whole_and_within_the_budget(lengths: list[list[int]], ranks: int, budget: int) -> None:
    rows = [TrainRow(length, length, True) for unit in lengths for length in unit]
    starts = [sum(len(unit) for unit in lengths[:n]) for n in range(len(lengths))]
    units = [tuple(range(start, start + len(unit))) for start, unit in zip(starts, lengths, strict=True)]
    plans = plan_units(rows, units, ranks, budget)
    assert sorted(r for plan in plans for batch in plan.micro_batches for r in batch) == list(range(len(rows)))
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    assert {plan.total_sequences for plan in plans} == {len(units)}
    for batch in (batch for plan in plans for batch in plan.micro_batches if batch):
        assert max(rows[r].tokens for r in batch) * len(batch) <= budget
        assert all(set(unit) <= set(batch) or not set(unit) & set(batch) for unit in units)

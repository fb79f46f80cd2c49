"""Offline training against fakes: order of the examples, ledger, resumption, evaluation and pairs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes import FakeRun, FakeTrainer, FaultyWorker
from troupe.orchestrator.cluster.worker_group import ExampleGroup
from troupe.orchestrator.controller import Controller, RunComponents
from troupe.orchestrator.data.mixture import PromptMixture
from troupe.orchestrator.data.prompts import PromptOrder, PromptSource, evaluation_picks
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.parts import run_parts
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.sources import SourceShare
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.sinks import LoggedRun, MetricSinks
from troupe.orchestrator.training.offline_source import (
    BatchMaker,
    ExampleEvaluator,
    OfflineComponents,
    OfflineSource,
    ReferenceScorer,
    Tokenized,
)
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import OfflineUpdates
from troupe.workers.contract.messages import RankPlan, ScoreSummary, TrainRow, UpdateMetrics
from troupe.workers.contract.offline_messages import EvaluationPart, ExampleBatchSummary, ExampleSummary

EXAMPLES = 10
SPEC = OfflineSpec.model_validate(
    {
        "name": "fakes",
        "model": {"path": "model"},
        "roles": {"policy": {}, "reference": {}},
        "algorithm": {"name": "dpo"},
        "schedule": {"steps": 5, "examples_per_step": 4, "train_timeout_s": 5.0, "step_timeout_s": 60.0},
        "data": {"train": {"kind": "jsonl", "path": "pairs.jsonl"}},
        "evaluation": {"every_steps": 2},
        "checkpoint": {"every_steps": 0},
        "output": {"replay_steps": 0},
    }
)

Picks = Sequence[tuple[str, int]]


class FakePairTrainer(FakeTrainer):
    """A trainer that records the pairs it trains on."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.trained: list[Sequence[tuple[str, int]]] = []
        self.plans: list[RankPlan] = []
        self.referenced: list[str] = []
        self.failed: dict[tuple[str, int], str] = {}

    async def tokenize(self, texts: object) -> tuple[ExampleSummary, object]:
        return ExampleSummary(EXAMPLES, 0, 0, ()), texts

    async def assemble(self, picks: Sequence[tuple[str, int]], examples: object) -> tuple[ExampleBatchSummary, Picks]:
        rows = tuple(TrainRow(10 + place, 4, True) for _, place in picks for _ in range(2))
        return ExampleBatchSummary(rows, members=(2,) * len(picks)), picks

    async def reference_logprobs(self, plan: RankPlan, *tables: Picks) -> tuple[ScoreSummary, str]:
        return ScoreSummary(0, self.failed), f"{len(tables[0])} scored"

    async def attach(self, batch: Picks, *scores: str) -> tuple[int, Picks]:
        self.referenced += scores
        return len(batch), batch

    async def update(self, plan: RankPlan, batch: Picks) -> UpdateMetrics:
        self.plans.append(plan)
        self.trained.append(batch)
        return UpdateMetrics({"loss": 0.25}, {"grad_norm": 1.0})

    async def evaluate(self, plan: RankPlan, batch: Picks) -> EvaluationPart:
        return EvaluationPart({"loss": 0.5}, {"accuracy": (3.0, 4.0)})


class OfflineRun(FakeRun[OfflineSpec]):
    """A controller of offline training with the fakes that it needs."""

    def __init__(self, out: Path, ranks: int = 1, resume: bool = False) -> None:
        self.trainers = [FakePairTrainer(rank) for rank in range(ranks)]
        self.shares: Sequence[SourceShare] = ()
        """The sources of a mixture, of 4 examples and of the others."""
        super().__init__(out, SPEC, resume)

    def build(self) -> Controller:
        """Build the controller. Call it inside the running event loop."""
        store, found, ledger = self.open_store()
        done = found.step if found else 0
        self.order: PromptOrder = PromptSource(Tokenized(EXAMPLES, "d"), 17)
        if self.shares:
            pools = [Tokenized(rows, "d") for rows in (4, EXAMPLES - 4)]
            self.order = PromptMixture(pools, self.shares, 17)
        ranks = [FaultyWorker(f"policy-{n}", t) for n, t in enumerate(self.trainers)]
        trainer = ExampleGroup("policy", ranks, 256, calls=self.trainer_calls)
        reference = ReferenceScorer(trainer, trainer.reference_logprobs)
        maker = BatchMaker(trainer, reference, "table", self.spec.schedule)
        console = Console(io.StringIO())
        picks = evaluation_picks(Tokenized(4, "e"), 17)
        updates = OfflineUpdates(self.spec, trainer, console)
        components = RunComponents(
            source=OfflineSource(OfflineComponents(maker, self.order, ledger, 4), console, self.stop),
            updates=updates,
            recovery=self.recovery(updates, None, store, console, done),
            sync=None,
            evaluator=ExampleEvaluator(trainer, maker, picks, 5.0),
            ledger=ledger,
            step_recorder=StepRecorder(self.spec, self.out, updates.trainers),
        )
        sinks = MetricSinks.open(LoggedRun(self.out, resume_at=done))
        parts = run_parts(self.spec, components, RunCheckpoints(store, found), sinks, console)
        return Controller(self.spec, components, parts, sinks, console, self.stop, done)

    @property
    def seen(self) -> list[int]:
        """Examples in the order they were trained on."""
        return [number for batch in self.trainers[0].trained for _, number in batch]


def test_every_epoch_trains_every_example_once_and_the_ledger_counts_them(tmp_path: Path) -> None:
    run = OfflineRun(tmp_path)
    outcome = run.run()
    assert sorted(run.seen[:EXAMPLES]) == sorted(run.seen[EXAMPLES:]) == list(range(EXAMPLES))
    assert run.seen[:EXAMPLES] != run.seen[EXAMPLES:]
    assert outcome.ledger == {"dispatched": 20, "trained": 20, "dropped": 0, "in_flight": 0, "retries": 0}
    assert [line["step"] for line in run.lines()] == [0, 1, 2, 3, 4, 5]
    assert "sync" not in run.lines()[-1]
    assert set(run.trainers[0].referenced) == {"4 scored"}


def test_evaluation_runs_at_the_start_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    run = OfflineRun(tmp_path)
    outcome = run.run()
    assert outcome.first_eval == outcome.last_eval == {"eval/examples": 4.0, "eval/loss": 0.5, "eval/accuracy": 0.75}
    assert outcome.summary(tmp_path)["held-out loss"] == "0.500 before, 0.500 after"
    stopped = replace(outcome, evaluated=0)
    assert stopped.summary(tmp_path)["held-out loss"] == "0.500 before training"
    assert [line["step"] for line in run.lines() if "eval/loss" in line] == [0, 2, 4, 5]
    assert len(run.trainers[0].referenced) == 5 + 1  # the held-out batch is scored once


def test_a_reference_without_a_finite_log_prob_ends_the_run_with_the_example(tmp_path: Path) -> None:
    run = OfflineRun(tmp_path)
    run.trainers[0].failed = {("e0-r3", 0): "the score of a token is not finite"}
    with pytest.raises(TroupeError, match="policy: e0-r3: the score of a token is not finite"):
        run.run()


def test_a_stopped_run_resumes_with_the_next_example(tmp_path: Path) -> None:
    whole = OfflineRun(tmp_path / "whole")
    whole.run()
    first = OfflineRun(tmp_path / "parts")

    outcome = first.run_until(2)
    assert outcome.stopped
    second = OfflineRun(tmp_path / "parts", resume=True)
    assert second.run().ledger["trained"] == 20
    assert first.seen + second.seen == whole.seen
    assert [line["step"] for line in second.lines()] == [0, 1, 2, 3, 4, 5]


def test_a_stopped_mixture_resumes_with_the_next_example_of_each_source(tmp_path: Path) -> None:
    def run_of(folder: str, resume: bool = False) -> OfflineRun:
        run = OfflineRun(tmp_path / folder, resume=resume)
        run.shares = [SourceShare(name="a", weight=3.0), SourceShare(name="b")]
        return run

    whole, first, second = run_of("whole"), run_of("parts"), run_of("parts", resume=True)
    whole.run()
    first.run_until(2)
    second.run()
    assert first.seen + second.seen == whole.seen
    names = ("source/a/share", "source/b/share", "source/a/epoch", "source/b/epoch", "epoch")
    lines = [[line[name] for name in names] for line in whole.lines()[1:]]
    assert [[line[name] for name in names] for line in second.lines()[1:]] == lines
    # Of four examples of a step, three are of a, which has four: 15 of them are three passes and three quarters.
    assert [line[:2] for line in lines] == [[0.75, 0.25]] * 5
    assert lines[-1][2:] == [3, 0, 0]
    own = [number for number in whole.seen if number < 4]
    assert all(sorted(own[start : start + 4]) == [0, 1, 2, 3] for start in (0, 4, 8))


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_stay_together_with_minibatches_and_ranks(tmp_path: Path, ranks: int) -> None:
    run = OfflineRun(tmp_path, ranks)
    run.change(schedule={"steps": 1, "epochs": 2, "minibatches": 2})
    run.run()
    plans = [plan for trainer in run.trainers for plan in trainer.plans]
    rows = [row for plan in plans for batch in plan.micro_batches for row in batch]
    assert sorted(rows) == sorted([*range(8), *range(8)])
    for plan in plans:
        assert plan.total_sequences == 2
        for batch in plan.micro_batches:
            assert all(row ^ 1 in batch for row in batch)

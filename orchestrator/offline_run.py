"""A run on given examples: joins trainers, data and books into the controller that every run has."""

from __future__ import annotations

import logging
from pathlib import Path

from orchestrator.cast import Scene
from orchestrator.checkpoint import Checkpoint, CheckpointStore, take_up
from orchestrator.controller import Cast, Controller, TrainPlan
from orchestrator.errors import TroupeError
from orchestrator.examples import ExamplePool
from orchestrator.handles import Gang, TableRef
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
from orchestrator.prompts import DataError, PromptSource, evaluation_picks
from orchestrator.spec_offline import OfflineEvaluation, OfflineSpec
from workers.messages_offline import ExampleSummary

log = logging.getLogger(__name__)

Pools = tuple[ExamplePool, ExamplePool | None]


class OfflineCompany:
    """Everybody a run on given examples needs."""

    def __init__(self, spec: OfflineSpec, out: Path, scene: Scene) -> None:
        stage = scene.stage
        if stage.policy is None:
            raise TroupeError("there is no model to train")
        self._spec = spec
        self._out = out
        self._scene = scene
        # The trained model gives its name to metrics and to its folder in a checkpoint.
        self._trainer = Gang(spec.row.trains, stage.policy.workers, stage.policy.micro_batch_tokens)

    async def controller(self, pools: Pools, store: CheckpointStore, found: Checkpoint | None) -> Controller:
        """The controller, at step 0 or where the checkpoint left off."""
        spec, done = self._spec, found.step if found is not None else 0
        examples, train = await self._tokenize(pools[0], "data.train")
        order = PromptSource(examples, spec.seed)
        ledger = Ledger.restore(found.state["ledger"]) if found is not None else Ledger()
        if found is not None:
            order.restore(found.state["source"])
            for line in await take_up(found, [self._trainer], spec.schedule.train_timeout_s):
                self._scene.console.message(line)
        held_out = pools[1] if spec.evaluation is not None else None
        makers = OfflineCast(self._maker(train), order, ledger, spec.schedule.examples_per_step)
        cast = Cast(
            policy=self._trainer,
            critic=None,
            source=OfflineSource(makers, self._scene.console, self._scene.stop),
            sync=None,
            evaluator=None if held_out is None else await self.evaluator(held_out),
            ledger=ledger,
            peaks=self._scene.cluster.peaks,
        )
        sinks = MetricSinks.open(self._out, tensorboard=spec.output.tensorboard, resume_at=done)
        return Controller(_train_plan(spec), cast, store, sinks, self._scene.console, self._scene.stop, done)

    async def evaluator(self, pool: ExamplePool) -> ExampleEvaluator:
        """Held-out figures of the model as it stands, on `data.eval`; on all of it where the spec says nothing else."""
        evaluation = self._spec.evaluation or OfflineEvaluation()
        examples, table = await self._tokenize(pool, "data.eval")
        picks = evaluation_picks(examples, self._spec.seed, evaluation.examples)
        return ExampleEvaluator(self._trainer, self._maker(table), picks, self._spec.schedule.train_timeout_s)

    async def _tokenize(self, pool: ExamplePool, label: str) -> tuple[Tokenized, TableRef]:
        """Every example as tokens, once; those that do not fit are bad rows like any others."""
        self._scene.console.phase("tokenise", 0, 1)
        worker, bound = self._trainer.workers[0], self._spec.schedule.train_timeout_s
        summary: ExampleSummary
        summary, table = await worker.call_for_table("tokenize", self._scene.cluster.put(pool.table), timeout_s=bound)
        problems = [*pool.problems, *summary.problems]
        if summary.refused and self._spec.failures.on_bad_row == "stop":
            raise DataError(summary.problems[0])
        if not summary.usable:
            raise DataError(f"{label}: no row can be used ({summary.refused} do not fit; the first: {problems[0]})")
        skipped = pool.bad_rows + summary.refused
        if skipped:
            self._scene.console.message(f"{label}: {skipped} bad rows skipped; the first: {problems[0]}")
        return Tokenized(summary.usable, pool.digest), table

    def _maker(self, table: TableRef) -> BatchMaker:
        schedule = self._spec.schedule
        bounds = Bounds(train_timeout_s=schedule.train_timeout_s, score_timeout_s=schedule.score_timeout_s)
        return BatchMaker(self._trainer, self._reference(), table, bounds)

    def _reference(self) -> ReferenceScorer | None:
        if self._scene.stage.reference is not None:
            return ReferenceScorer(self._scene.stage.reference, "score")
        return ReferenceScorer(self._trainer, "reference_logprobs") if self._spec.reference_in_policy else None


def _train_plan(spec: OfflineSpec) -> TrainPlan:
    schedule, evaluation = spec.schedule, spec.evaluation
    return TrainPlan(
        steps=schedule.steps,
        epochs=schedule.epochs,
        minibatches=schedule.minibatches,
        skip_silent=False,
        seed=spec.seed,
        critic_warmup=0,
        train_timeout_s=schedule.train_timeout_s,
        step_timeout_s=schedule.step_timeout_s,
        probe_every_s=schedule.step_timeout_s,  # there are no engines to look after
        checkpoint_every=spec.checkpoint.every_steps,
        evaluate_every=evaluation.every_steps if evaluation is not None else 0,
        evaluate_at_start=evaluation is not None and evaluation.at_start,
        evaluate_at_end=evaluation is not None and evaluation.at_end,
        nonfinite_limit=spec.failures.nonfinite_steps,
        averages=spec.roles.policy.ema_decay > 0,
    )

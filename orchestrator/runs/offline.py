"""A run on offline data: assembles trainers, data and ledger into the controller that every run uses."""

from __future__ import annotations

from functools import partial

from troupe.orchestrator.controller import Controller, RunComponents, RunOutcome
from troupe.orchestrator.data.mixture import prompt_order
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import PromptOrder, evaluation_picks
from troupe.orchestrator.data.summary import data_metrics
from troupe.orchestrator.errors import DataError, TroupeError
from troupe.orchestrator.runs.parts import controller_of
from troupe.orchestrator.runs.session import Session
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.spec.offline import OfflineEvaluation
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.training.checkpoint import load_checkpoint
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.offline_source import (
    BatchMaker,
    ExampleEvaluator,
    OfflineComponents,
    OfflineSource,
    ReferenceScorer,
    Tokenized,
)
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import OfflineUpdates, UpdateProfiles
from troupe.workers.contract.roles import TableRef


async def train_offline(session: Session) -> RunOutcome:
    request = session.request
    controller = await OfflineRun(session).controller()
    if session.checkpoints.found is not None:  # the resume stands
        request.spec.write(request.out / RESOLVED_SPEC)
    return await controller.run()


class OfflineRun:
    """Assembles trainers, data and ledger into a controller."""

    def __init__(self, session: Session) -> None:
        if session.workers.examples is None:
            raise TroupeError("the run has no trainer: it cannot train")
        self._spec = session.request.spec.offline
        self._out = session.request.out
        self._session = session
        self._trainer = session.workers.examples

    async def controller(self) -> Controller:
        spec, data, checkpoints = self._spec, self._session.data, self._session.checkpoints
        found, done = checkpoints.found, checkpoints.done
        profiles = UpdateProfiles(spec.output.profile, self._out)
        updates = OfflineUpdates(spec, self._trainer, self._session.console, profiles)
        calls = self._session.launcher.calls
        recovery = TrainerRecovery(
            spec=spec,
            calls=calls,
            updates=updates,
            push=None,
            store=checkpoints.store,
            restart=self._session.launcher.restart,
            console=self._session.console,
            done=done,
        )
        calls.recover_with(recovery)
        examples, train = await self._tokenize(data.train, "data.train")
        held_out = data.held_out.get("eval") if spec.evaluation is not None else None
        counts = data_metrics(data.pools) | _tokenized("train", data.train, examples)
        evaluator = None
        if held_out is not None:
            tokenized, table = await self._tokenize(held_out, "data.eval")
            evaluator = self._evaluator(tokenized, table)
            counts |= _tokenized("eval", held_out, tokenized)
        order = self._order(examples)
        ledger = Ledger()
        if found is not None:
            with found.restoring():
                ledger = Ledger.restore(found.state["ledger"])
            loading = partial(load_checkpoint, found, updates.trainers, spec.schedule.train_timeout_s)
            for line in await calls.retry(loading):
                self._session.console.message(line)
        offline = OfflineComponents(self._maker(train), order, ledger, spec.schedule.examples_per_step)
        cluster = self._session.cluster
        recorder = RunRecorder(cluster.calls, cluster.events, self._out, done, spec.output.keep_gib)
        components = RunComponents(
            source=OfflineSource(offline, self._session.console, self._session.stop),
            updates=updates,
            recovery=recovery,
            sync=None,
            step_recorder=StepRecorder(spec, self._out, updates.trainers),
            evaluator=evaluator,
            held_out_rows="" if held_out is None else held_out.digest,
            ledger=ledger,
            peaks=cluster.peaks,
            recorder=recorder,
            data=counts,
        )
        return await controller_of(self._session, components)

    def _order(self, examples: Tokenized) -> PromptOrder:
        """The order of examples. Raises DataError: no example of a source can be used."""
        for number, source in enumerate(self._spec.data.mixture):
            if source.name not in examples.parts:
                raise DataError(f"data.train.{number}: no row of {source.name} fits the model")
        return prompt_order(self._spec, examples)

    async def evaluator(self) -> ExampleEvaluator:
        """Held-out metrics of the current model on `data.eval`; on all of it unless the spec says otherwise."""
        return self._evaluator(*await self._tokenize(self._session.data.held_out["eval"], "data.eval"))

    def _evaluator(self, examples: Tokenized, table: TableRef) -> ExampleEvaluator:
        evaluation = self._spec.evaluation or OfflineEvaluation()
        picks = evaluation_picks(examples, self._spec.seed, evaluation.examples)
        return ExampleEvaluator(self._trainer, self._maker(table), picks, self._spec.schedule.train_timeout_s)

    async def _tokenize(self, pool: Pool, label: str) -> tuple[Tokenized, TableRef]:
        """Tokenizes every example once; an example that is too long counts as a bad row."""
        self._session.console.phase("tokenise")
        timeout_s = self._spec.schedule.train_timeout_s
        summary, table = await self._trainer.tokenize(self._session.cluster.put(pool.table), timeout_s=timeout_s)
        if summary.refused and self._spec.failures.on_bad_row == "stop":
            raise DataError(summary.problems[0])
        if not summary.usable:
            raise DataError(
                f"{label}: no row can be used ({summary.refused} do not fit; the first: {summary.problems[0]})"
            )
        if summary.refused:
            words = f"{summary.refused} rows do not fit and are skipped"
            self._session.console.message(f"{label}: {words}; the first: {summary.problems[0]}")
        parts = {name: Tokenized(rows, pool.parts[name].digest) for name, rows in summary.sources.items()}
        return Tokenized(summary.usable, pool.digest, parts), table

    def _maker(self, table: TableRef) -> BatchMaker:
        return BatchMaker(self._trainer, self._reference(), table, self._spec.schedule)

    def _reference(self) -> ReferenceScorer | None:
        reference, trainer = self._session.workers.reference, self._trainer
        if self._spec.algorithm.distillation.in_process:
            return None
        if reference is not None:
            return ReferenceScorer(reference, reference.score)
        return ReferenceScorer(trainer, trainer.reference_logprobs) if self._spec.reference_in_policy else None


def _tokenized(name: str, pool: Pool, examples: Tokenized) -> dict[str, float]:
    """Metrics of a pool once it is tokenized: examples that do not fit are bad rows too."""
    bad = pool.bad_rows + pool.rows - examples.rows
    return {f"data/{name}_rows": float(examples.rows), f"data/{name}_bad_rows": float(bad)}

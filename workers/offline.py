"""Offline trainers: the policy (SFT and preferences) and the reward model.

They are training ranks like the policy and the critic: they join, save, load, export and update in the same way. The
algorithms differ in their objective (`workers/algorithms/offline_objectives.py`), selected by the loss configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from troupe.workers.algorithms.offline_objectives import OBJECTIVES, ObjectiveOutput, Scored, Totals
from troupe.workers.algorithms.preference_losses import kto_reference_point
from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.messages import RankPlan, UpdateMetrics, WorkerHealth
from troupe.workers.contract.offline_config import KdLossConfig, OfflineConfig, ProcessLossConfig, RewardLossConfig
from troupe.workers.contract.offline_messages import (
    EvaluationPart,
    ExampleBatchSummary,
    ExampleSummary,
    add_tallies,
    tally_means,
)
from troupe.workers.data.examples import ExampleMicroBatch, ExampleTable, Picks, assemble, attach, tokenize
from troupe.workers.data.sampled_examples import sampled_examples
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.data.turn_ends import padding_besides, turn_ends
from troupe.workers.models.modeling import RewardScores, evaluating, load_value, share_backbone, torch_dtype
from troupe.workers.models.token_batch import TokenBatch
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.deepspeed_engine import Forward
from troupe.workers.training.group import all_reduce
from troupe.workers.training.rank import TrainingRank, added
from troupe.workers.training.zero3 import partitioner_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OfflineRank(TrainingRank[OfflineConfig]):
    """One rank of a group that trains on offline data; subclasses define the model."""

    def __init__(self, config: OfflineConfig, name: str) -> None:
        super().__init__(config, name)
        self._objective = OBJECTIVES[type(config.loss)]
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def tokenize(self, texts: pa.Table) -> tuple[ExampleSummary, pa.Table]:
        read = sampled_examples if self._config.examples.sampled else tokenize
        return read(self._tokens(), texts, self._config.examples)

    def assemble(self, picks: Picks, examples: pa.Table) -> tuple[ExampleBatchSummary, pa.Table]:
        return assemble(picks, examples, self._config.examples)

    def attach(self, batch: pa.Table, *scores: pa.Table) -> tuple[int, pa.Table]:
        """(rows, batch with the reference's log-probs). Not collective."""
        return batch.num_rows, attach(batch, scores)

    def update(self, plan: RankPlan, batch: pa.Table) -> UpdateMetrics:
        table, meter = ExampleTable(batch), self._meter()
        point = self._reference_point(self.engine.module, plan, table)

        def output(rows: Sequence[int], forward: Forward) -> tuple[TokenBatch, ObjectiveOutput]:
            micro_batch = self._batch(table, rows, plan)
            return micro_batch.tokens, self._loss(forward, micro_batch, plan, point)

        update = self._update(plan, [partial(output, rows) for rows in plan.micro_batches], meter)
        tally = _tally(update.outputs)
        totals = all_reduce({f"{n}/total": t for n, (t, _) in tally.items()}, self._device, "sum")
        weights = all_reduce({f"{n}/weight": w for n, (_, w) in tally.items()}, self._device, "sum")
        means = tally_means({name: (totals[f"{name}/total"], weights[f"{name}/weight"]) for name in tally})
        return update.metrics(added(output.terms for output in update.outputs), means, self._device)

    def evaluate(self, plan: RankPlan, batch: pa.Table) -> EvaluationPart:
        table, module = ExampleTable(batch), self.engine.module
        with evaluating(module), torch.no_grad():
            point = self._reference_point(module, plan, table)
            outputs = [self._loss(module, self._batch(table, rows, plan), plan, point) for rows in plan.micro_batches]
        return EvaluationPart(added(output.terms for output in outputs), _tally(outputs))

    def _batch(self, table: ExampleTable, rows: Sequence[int], plan: RankPlan) -> ExampleMicroBatch:
        """The rows of a micro-batch that are trained on; mismatched responses serve only the reference point."""
        skip = self._config.examples.mismatched
        return table.cut([row for row in rows if not (skip and table.member[row])], plan, self.engine.device)

    def _reference_point(self, module: torch.nn.Module, plan: RankPlan, table: ExampleTable) -> float:
        """z0 of KTO, from the mismatched responses of the whole update over all ranks; 0 for other objectives."""
        if not self._config.examples.mismatched:
            return 0.0
        total = count = 0.0
        with torch.no_grad():
            for rows in plan.micro_batches:
                batch = table.cut([row for row in rows if table.member[row]], plan, self.engine.device)
                scored = self._scored(module, batch, 0.0)
                total, count = total + float(scored.ratios(per_token=False).sum()), count + scored.rows
        sums = all_reduce({"total": total, "count": count}, self._device, "sum")
        return kto_reference_point(sums["total"], sums["count"])

    def _loss(self, forward: Forward, batch: ExampleMicroBatch, plan: RankPlan, point: float) -> ObjectiveOutput:
        totals = Totals(examples=plan.total_sequences, tokens=plan.total_loss_tokens)
        return self._objective(self._scored(forward, batch, point), self._config.loss, totals)

    def _scored(self, forward: Forward, batch: ExampleMicroBatch, point: float) -> Scored:
        """The micro-batch under the model."""
        raise NotImplementedError

    def _tokens(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = load_chat_tokenizer(self._config.model)
        return self._tokenizer


class ExamplePolicyWorker(OfflineRank):
    """One rank of a policy that trains on demonstrations, preferences or the samples of a run."""

    @property
    def _distill(self) -> DistillConfig:
        loss = self._config.loss
        return loss.divergence if isinstance(loss, KdLossConfig) else super()._distill

    def build(self) -> WorkerHealth:
        """Load the policy and, if it is colocated, the reference."""
        self._train_policy(self._config.reference_model, temperature=1.0)
        return self.health()

    def _scored(self, forward: Forward, batch: ExampleMicroBatch, point: float) -> Scored:
        reader = self._teacher(batch.table, batch.tokens) if self._distill.coef else None
        logprobs, _, *compared = forward(batch=batch.tokens, reader=reader)
        scored = replace(_unscored(batch, point), logprobs=logprobs, ref_logprobs=batch.ref_logprobs)
        return replace(scored, divergences=compared[0] if compared else None)


class RewardTrainer(OfflineRank):
    """One rank of a reward model: a sequence classifier with one label, as the roles `reward` and `critic` load it."""

    def build(self) -> WorkerHealth:
        """Load the backbone with a head that starts at zero, or with the head it was saved with."""
        config = self._config
        announce(Activity.MODEL)
        partitioner = partitioner_for(config.model, config.trainer)
        model = load_value(self._below, partitioner)
        text_config = model.config.get_text_config()
        text_config.pad_token_id = padding_besides(turn_ends(self._tokens()).ids, text_config, self._tokens())
        keeps_language = isinstance(config.loss, RewardLossConfig) and config.loss.lm_coef > 0
        language = share_backbone(model, self._below, self._head_chunks(model), partitioner) if keeps_language else None
        self._train(RewardScores(model, language), model, torch_dtype(config.model.dtype))
        return self.health()

    @property
    def _by_token(self) -> bool:
        """Whether the loss compares the scores of all response tokens."""
        loss = self._config.loss
        return isinstance(loss, RewardLossConfig) and loss.level == "token"

    def _scored(self, forward: Forward, batch: ExampleMicroBatch, point: float) -> Scored:
        tokens, unscored = batch.tokens, _unscored(batch, point)
        # Only the best responses' likelihood is used: the output head, the most expensive layer, runs on no other.
        kept = unscored.best[tokens.sequence]
        by_step = isinstance(self._config.loss, ProcessLossConfig)
        read_at = tokens.positions + 1 if self._by_token or by_step else None
        read_at = read_at[tokens.loss_mask] if read_at is not None and by_step else read_at
        best_only = replace(tokens, positions=tokens.positions[kept], targets=tokens.targets[kept])
        rewards, token_rewards, best = forward(batch=best_only, read_at=read_at)
        logprobs = None if best is None else best.new_zeros(len(kept)).masked_scatter(kept, best)
        # The filler batch has a sequence and no row.
        return replace(unscored, logprobs=logprobs, rewards=rewards[: unscored.rows], token_rewards=token_rewards)


def _unscored(batch: ExampleMicroBatch, point: float) -> Scored:
    """The micro-batch without the models' outputs. `point`: KTO's reference point."""
    return Scored(
        groups=batch.groups,
        sequence=batch.tokens.sequence,
        loss_mask=batch.tokens.loss_mask,
        score=batch.score,
        margin=batch.margin,
        desirable=batch.desirable,
        targets=batch.tokens.targets,
        step_labels=batch.step_labels,
        reference_point=point,
    )


def _tally(outputs: Sequence[ObjectiveOutput]) -> dict[str, tuple[float, float]]:
    tallies = ({name: (float(t), float(w)) for name, (t, w) in output.tally.items()} for output in outputs)
    return add_tallies(tallies)

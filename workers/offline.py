"""Trainers on given examples: the policy (SFT and preferences) and the reward model.

They are ranks like the policy's and the critic's: they join, save, load, export and update alike. What differs between
algorithms is the objective (`workers.objectives`), looked up once by the configuration they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import torch

from workers.config import Rendezvous
from workers.config_offline import OfflineConfig, RewardLossConfig
from workers.deepspeed_engine import StepResult, TrainEngine, all_reduce
from workers.examples import ExampleMicroBatch, ExampleTable, Picks, assemble, attach, pack, tokenize
from workers.messages import RankPlan, UpdateMetrics, WorkerHealth
from workers.messages_offline import EvaluationPart, ExampleBatchSummary, ExampleSummary, add_tallies, figures
from workers.modeling import (
    CausalLogprobs,
    RewardScores,
    head_chunks,
    load_causal,
    load_value,
    packs,
    score_plan,
    share_backbone,
)
from workers.objectives import OBJECTIVES, ObjectiveOutput, Scored, Totals
from workers.preference_losses import kto_reference_point
from workers.rank import TrainingRank, own_peak

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Forward = Callable[..., Any]


class ExampleTrainer(TrainingRank):
    """One rank of a group that trains on given examples; what the model is, a subclass says."""

    def __init__(self, config: OfflineConfig, name: str) -> None:
        super().__init__(name, config.device, config.model.path, config.seed, config.trainer.threads)
        self._config = config
        self._objective = OBJECTIVES[type(config.loss)]
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """Join the group and load the models. Raises OSError for a missing model, ValueError for an unfit one."""
        self.join(rendezvous)
        return self.build()

    def build(self) -> WorkerHealth:
        """Load the models and put the trained one under DeepSpeed, in a process that has joined its group."""
        raise NotImplementedError

    def tokenize(self, texts: pa.Table) -> tuple[ExampleSummary, pa.Table]:
        """See `workers.examples.tokenize`; not collective, one rank does it for all."""
        return tokenize(self._tokens(), texts, self._config.examples)

    def assemble(self, picks: Picks, examples: pa.Table) -> tuple[ExampleBatchSummary, pa.Table]:
        """See `workers.examples.assemble`; not collective."""
        return assemble(picks, examples, self._config.examples)

    def attach(self, batch: pa.Table, *scores: pa.Table) -> tuple[int, pa.Table]:
        """(rows, batch with the reference's log-probs); not collective."""
        return batch.num_rows, attach(batch, scores)

    def update(self, plan: RankPlan, batch: pa.Table) -> UpdateMetrics:
        """One optimizer step on the plan's rows of an EXAMPLE_BATCH table. Collective."""
        table = ExampleTable(batch)
        point = self._reference_point(self.engine.module, plan, table)
        outputs: list[ObjectiveOutput] = []

        def loss_fn(forward: Forward, rows: Sequence[int]) -> torch.Tensor:
            output = self._loss(forward, self._batch(table, rows), plan, point)
            outputs.append(output.statistics())
            return output.loss

        step = self.engine.update(plan.micro_batches, loss_fn)
        return self._metrics(step, outputs, sum(map(len, plan.micro_batches)))

    def evaluate(self, plan: RankPlan, batch: pa.Table) -> EvaluationPart:
        """This rank's share of the loss and the figures of the plan's rows, without learning from them. Collective."""
        table, module = ExampleTable(batch), self.engine.module
        training = module.training
        module.eval()
        with torch.no_grad():
            point = self._reference_point(module, plan, table)
            outputs = [self._loss(module, self._batch(table, rows), plan, point) for rows in plan.micro_batches]
        module.train(training)
        return EvaluationPart(_terms(outputs), _tally(outputs))

    def _batch(self, table: ExampleTable, rows: Sequence[int]) -> ExampleMicroBatch:
        """What is trained on of a micro-batch: mismatched responses only help to find the reference point."""
        skip = self._config.examples.mismatched
        return table.batch([row for row in rows if not (skip and table.member[row])], self.engine.device)

    def _reference_point(self, module: torch.nn.Module, plan: RankPlan, table: ExampleTable) -> float:
        """z0 of KTO from the mismatched responses of the whole update, over all ranks; 0 for other objectives."""
        if not self._config.examples.mismatched:
            return 0.0
        total = count = 0.0
        with torch.no_grad():
            for rows in plan.micro_batches:
                batch = table.batch([row for row in rows if table.member[row]], self.engine.device)
                scored = self._scored(module, batch, 0.0)
                total, count = total + float(scored.ratios(per_token=False).double().sum()), count + scored.rows
        sums = all_reduce({"total": total, "count": count}, self._device, "sum")
        return kto_reference_point(sums["total"], sums["count"])

    def _loss(self, forward: Forward, batch: ExampleMicroBatch, plan: RankPlan, point: float) -> ObjectiveOutput:
        totals = Totals(examples=plan.total_sequences, tokens=plan.total_loss_tokens)
        return self._objective(self._scored(forward, batch, point), self._config.loss, totals)

    def _scored(self, forward: Forward, batch: ExampleMicroBatch, point: float) -> Scored:
        """The micro-batch under the model."""
        raise NotImplementedError

    def _metrics(self, step: StepResult, outputs: Sequence[ObjectiveOutput], sequences: int) -> UpdateMetrics:
        tally = _tally(outputs)
        totals = all_reduce({f"{n}/total": t for n, (t, _) in tally.items()}, self._device, "sum")
        weights = all_reduce({f"{n}/weight": w for n, (_, w) in tally.items()}, self._device, "sum")
        means = figures({name: (totals[f"{name}/total"], weights[f"{name}/weight"]) for name in tally})
        return UpdateMetrics(
            sums=_terms(outputs) | {"sequences": float(sequences)},
            values=means | {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate},
            skipped=step.skipped,
            peak=own_peak(self._device),
        )

    def _tokens(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            model = self._config.model
            found = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
            self._tokenizer = cast("PreTrainedTokenizerBase", found)
        return self._tokenizer

    def _chunks(self, model: Any) -> int:
        return head_chunks(model.config.get_text_config().vocab_size, self._config.trainer.micro_batch_tokens)


class ExamplePolicyWorker(ExampleTrainer):
    """One rank of a policy that learns from demonstrations or preferences."""

    def __init__(self, config: OfflineConfig, name: str) -> None:
        super().__init__(config, name)
        self._reference: CausalLogprobs | None = None

    def build(self) -> WorkerHealth:
        """Load the policy and, where it is colocated, the reference."""
        config = self._config
        model = load_causal(config.model)
        module = CausalLogprobs(model, temperature=1.0, chunks=self._chunks(model))
        if config.packing and not packs(module):
            raise ValueError(
                f"{type(model).__name__} does not keep packed sequences apart: set algorithm.packing: false"
            )
        self._engine = TrainEngine(module, model, config.trainer, config.total_updates, config.device, model.dtype)
        if config.reference_model is not None:
            reference = load_causal(config.reference_model)
            scorer = CausalLogprobs(reference, temperature=1.0, chunks=self._chunks(reference))
            self._reference = scorer.requires_grad_(False).to(self._engine.device)
        return self.health()

    def reference_logprobs(self, plan: RankPlan, *tables: pa.Table) -> tuple[int, pa.Table]:
        """(rows, token_scores table): `ref_logprobs` of the plan's rows under the colocated reference.

        Raises RuntimeError where the worker has none.
        """
        if self._reference is None:
            raise RuntimeError(f"{self._name} has no colocated reference")
        return score_plan(self._reference, plan, tables, "ref_logprobs", self.engine.device)

    def _scored(self, forward: Forward, batch: ExampleMicroBatch, point: float) -> Scored:
        tokens = batch.tokens
        if self._config.packing:
            packed = pack(tokens)
            logprobs, _ = forward(packed.input_ids, None, packed.positions, tokens.targets, packed.position_ids)
        else:
            logprobs, _ = forward(tokens.input_ids, tokens.attention_mask, tokens.positions, tokens.targets)
        return Scored(
            groups=batch.groups,
            sequence=tokens.sequence,
            loss_mask=tokens.loss_mask,
            score=batch.score,
            margin=batch.margin,
            desirable=batch.desirable,
            logprobs=logprobs,
            ref_logprobs=batch.ref_logprobs,
            reference_point=point,
        )


class RewardTrainer(ExampleTrainer):
    """One rank of a reward model: a sequence classifier with one label, as the roles `reward` and `critic` load it."""

    def build(self) -> WorkerHealth:
        """Load the backbone with a head that starts at zero (or with the one it was saved with)."""
        config = self._config
        model = load_value(config.model)
        _keep_last_token(model.config.get_text_config(), self._tokens())
        keeps_language = isinstance(config.loss, RewardLossConfig) and config.loss.lm_coef > 0
        language = share_backbone(model, config.model, self._chunks(model)) if keeps_language else None
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        module = RewardScores(model, language)
        self._engine = TrainEngine(module, model, config.trainer, config.total_updates, config.device, dtype)
        return self.health()

    def _scored(self, forward: Forward, batch: ExampleMicroBatch, point: float) -> Scored:
        tokens = batch.tokens
        # Only the best answer's likelihood may count: the output head, the dearest layer, runs on nothing else.
        kept = (batch.groups.member == 0)[tokens.sequence]
        rewards, best = forward(tokens.input_ids, tokens.attention_mask, tokens.positions[kept], tokens.targets[kept])
        logprobs = None if best is None else best.new_zeros(len(kept)).masked_scatter(kept, best)
        rows = len(batch.groups.group)
        return Scored(
            groups=batch.groups,
            sequence=tokens.sequence,
            loss_mask=tokens.loss_mask,
            score=batch.score,
            margin=batch.margin,
            desirable=batch.desirable,
            logprobs=logprobs,
            rewards=rewards[:rows],  # the filler batch has a sequence and no row
            reference_point=point,
        )


def _keep_last_token(text_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let no token that ends a turn be taken for padding.

    A classifier reads its score at the last token that is not padding. Where padding and end of turn are one token it
    would read it one token early, and not where it was trained to.
    """
    configured = text_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    choices = (text_config.pad_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    free = [choice for choice in choices if choice is not None and choice not in ends]
    text_config.pad_token_id = free[0] if free else (0 if 0 not in ends else text_config.vocab_size - 1)


def _terms(outputs: Sequence[ObjectiveOutput]) -> dict[str, float]:
    return {name: sum(float(output.terms[name]) for output in outputs) for name in outputs[0].terms}


def _tally(outputs: Sequence[ObjectiveOutput]) -> dict[str, tuple[float, float]]:
    return add_tallies(_floats(output.tally) for output in outputs)


def _floats(tally: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    return {name: (float(total), float(weight)) for name, (total, weight) in tally.items()}

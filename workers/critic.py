"""The critic: values of sampled tokens, and updates."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch

from troupe.workers.algorithms.policy_loss import LossOutput, token_weights, value_loss
from troupe.workers.contract.config import CriticConfig, Rendezvous
from troupe.workers.contract.messages import RankPlan, UpdateMetrics, WorkerHealth
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import TokenValues, load_value, score_plan, torch_dtype
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.deepspeed_engine import Forward, TrainEngine
from troupe.workers.training.group import sequence_group
from troupe.workers.training.profiling import profiled
from troupe.workers.training.rank import TrainingRank, update_metrics


class CriticWorker(TrainingRank):
    """One rank of the critic's training group."""

    def __init__(self, config: CriticConfig, name: str) -> None:
        super().__init__(name, config.device, config.model, config.seed, config.trainer.threads)
        self._config = config

    def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """Join the group and load the model. Raises OSError for a missing model, ValueError for an unsuitable one."""
        self.join(rendezvous)
        return self.build()

    def build(self) -> WorkerHealth:
        """Load the model into DeepSpeed; the process must have joined its group."""
        config = self._config
        announce(Activity.MODEL)
        model = load_value(config.model)
        dtype = torch_dtype(config.model.dtype)
        module = TokenValues(model)
        sequence = sequence_group(config.trainer.sequence_parallel_size)
        self._packs = adapt(module, model, config.device, config.trainer.packing, sequence)
        announce(Activity.TRAINER)
        self._engine = TrainEngine(module, model, config.trainer, config.total_updates, config.device, dtype)
        return self.health()

    def compute_values(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[int, pa.Table]:
        """(rows, token_scores table): `values` of the plan's rows under the current critic. Collective."""
        return score_plan(self.engine.module, plan, rollouts, "values", self.engine.device)

    def update(self, plan: RankPlan, batch: pa.Table) -> UpdateMetrics:
        """One optimizer step on the plan's rows of a TRAIN table with values and returns. Collective."""
        table = TokenTable(batch)
        outputs: list[LossOutput] = []
        meter = self._meter()

        def loss_fn(forward: Forward, rows: Sequence[int]) -> torch.Tensor:
            micro_batch = table.cut(rows, plan).to(self.engine.device)
            meter.note(micro_batch)
            output = self._loss(forward, micro_batch, table, plan)
            outputs.append(output.statistics())
            return output.loss

        with profiled(plan.trace, self._device):
            step = self.engine.update(plan.micro_batches, loss_fn)
        return update_metrics(step, outputs, meter, self._device, sum(map(len, plan.micro_batches)))

    def _loss(self, forward: Forward, micro_batch: TokenBatch, table: TokenTable, plan: RankPlan) -> LossOutput:
        values = forward(
            micro_batch.input_ids,
            micro_batch.attention_mask,
            micro_batch.positions,
            micro_batch.targets,
            micro_batch.position_ids,
        )
        old_values, returns = table.floats("values", micro_batch), table.floats("returns", micro_batch)
        if old_values is None or returns is None:
            raise ValueError("a critic batch needs the columns values and returns")
        mask = micro_batch.loss_mask
        totals = plan.total_loss_tokens, plan.total_sequences
        weights = token_weights(mask, table.samples(micro_batch)[1], "token_mean", *totals, max_tokens=1)
        return value_loss(values, old_values, returns, weights, mask, self._config.loss)

"""The critic: values of sampled tokens, and updates."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch

from troupe.workers.algorithms.policy_loss import LossOutput, token_weights, value_loss
from troupe.workers.contract.config import CriticConfig
from troupe.workers.contract.messages import RankPlan, UpdateMetrics, WorkerHealth
from troupe.workers.models.modeling import TokenValues, load_value, score_plan, torch_dtype
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.deepspeed_engine import Forward
from troupe.workers.training.meter import profiled
from troupe.workers.training.rank import TrainingRank, update_metrics
from troupe.workers.training.zero3 import partitioner_for


class CriticWorker(TrainingRank):
    """One rank of the critic's training group."""

    def __init__(self, config: CriticConfig, name: str) -> None:
        super().__init__(config, name)
        self._config = config

    def build(self) -> WorkerHealth:
        """Load the critic; see `TrainingRank.build`."""
        config = self._config
        announce(Activity.MODEL)
        model = load_value(self._below, partitioner_for(config.model, config.trainer))
        self._train(TokenValues(model), model, torch_dtype(config.model.dtype))
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

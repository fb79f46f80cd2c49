"""The critic: values of sampled tokens, and updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from troupe.workers.algorithms.policy_loss import LossOutput, token_weights, value_loss
from troupe.workers.contract.config import CriticConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary, UpdateMetrics, WorkerHealth
from troupe.workers.models.modeling import TokenValues, load_value, score_plan, torch_dtype
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.deepspeed_engine import Forward
from troupe.workers.training.rank import TrainingRank, loss_metrics
from troupe.workers.training.zero3 import partitioner_for


class CriticWorker(TrainingRank[CriticConfig]):
    """One rank of the critic's training group."""

    def build(self) -> WorkerHealth:
        """Load the critic; see `TrainingRank.build`."""
        config = self._config
        announce(Activity.MODEL)
        model = load_value(self._below, partitioner_for(config.model, config.trainer))
        self._train(TokenValues(model), model, torch_dtype(config.model.dtype))
        return self.health()

    def compute_values(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        return score_plan(self.engine.module, plan, rollouts, "values", self.engine.device)

    def update(self, plan: RankPlan, batch: pa.Table) -> UpdateMetrics:
        table = TokenTable(batch)
        update = self._update(plan, [partial(self._output, table, plan, rows) for rows in plan.micro_batches])
        return loss_metrics(update, self._device)

    def _output(
        self, table: TokenTable, plan: RankPlan, rows: Sequence[int], forward: Forward
    ) -> tuple[TokenBatch, LossOutput]:
        micro_batch = table.cut(rows, plan).to(self.engine.device)
        values = forward(batch=micro_batch)
        old_values, returns = table.floats("values", micro_batch), table.floats("returns", micro_batch)
        if old_values is None or returns is None:
            raise ValueError("a critic batch needs the columns values and returns")
        mask = micro_batch.loss_mask
        totals = plan.total_loss_tokens, plan.total_sequences
        weights = token_weights(mask, table.samples(micro_batch)[1], "token_mean", *totals, max_tokens=1)
        return micro_batch, value_loss(values, old_values, returns, weights, mask, self._config.loss)

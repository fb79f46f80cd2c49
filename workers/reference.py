"""The reference worker: a frozen model that scores samples."""

from __future__ import annotations

import pyarrow as pa

from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import ReferenceConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary, WorkerHealth
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.rank import prepare_torch, worker_health
from troupe.workers.training.reference_model import ReferenceModel, ShardedReference


class ReferenceWorker:
    """Scores samples under a frozen model. Workers of this role are independent of each other."""

    def __init__(self, config: ReferenceConfig, name: str) -> None:
        pickle_tables()
        self._config = config
        self._name = name
        self._model: ReferenceModel | ShardedReference | None = None

    def start(self) -> WorkerHealth:
        """Load the model, divided over several processes if `shards` says so. Raises OSError if it is missing."""
        prepare_torch(self._config.threads)
        announce(Activity.MODEL)
        self._model = ReferenceModel(self._config) if self._config.shards == 1 else ShardedReference(self._config)
        return self.health()

    def packs(self) -> bool:
        """Whether the model takes the rows of a micro-batch concatenated, without padding."""
        return self._started.packs

    def score(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """(summary, token_scores table): `ref_logprobs` of the plan's rows. Raises RuntimeError before `start`."""
        scored = self._started.score(plan, rollouts)
        return ScoreSummary(scored.rows, peak=scored.peak), scored.table

    def health(self) -> WorkerHealth:
        """Health of the worker."""
        return worker_health(self._name, 0, self._config.device)

    def close(self) -> None:
        """Release the model."""
        if isinstance(self._model, ShardedReference):
            self._model.close()
        self._model = None

    @property
    def _started(self) -> ReferenceModel | ShardedReference:
        if self._model is None:
            raise RuntimeError(f"{self._name} has not been started")
        return self._model

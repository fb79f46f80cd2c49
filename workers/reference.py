"""The reference worker: a frozen model that scores samples."""

from __future__ import annotations

import pyarrow as pa

from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import ReferenceConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary, WorkerHealth
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, head_chunks, load_causal, score_plan
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.rank import own_peak, prepare_torch, worker_health


class ReferenceWorker:
    """Scores samples under a frozen model. Workers of this role are independent of each other."""

    def __init__(self, config: ReferenceConfig, name: str) -> None:
        pickle_tables()
        self._config = config
        self._name = name
        self._module: CausalLogprobs | None = None
        self._packs = False

    def start(self) -> WorkerHealth:
        """Load the model. Raises OSError if it is missing."""
        prepare_torch(self._config.threads)
        announce(Activity.MODEL)
        config = self._config
        model = load_causal(config.model)
        chunks = head_chunks(model.config.get_text_config().vocab_size, config.micro_batch_tokens, config.device)
        module = CausalLogprobs(model, config.temperature, chunks)
        self._packs = adapt(module, model, config.device, packing=True)
        self._module = module.requires_grad_(False).to(config.device)
        return self.health()

    def packs(self) -> bool:
        """Whether the model takes the rows of a micro-batch concatenated, without padding."""
        return self._packs

    def score(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """(summary, token_scores table): `ref_logprobs` of the plan's rows. Raises RuntimeError before `start`."""
        if self._module is None:
            raise RuntimeError(f"{self._name} has not been started")
        rows, table = score_plan(self._module, plan, rollouts, "ref_logprobs", self._config.device)
        return ScoreSummary(rows, peak=own_peak(self._config.device)), table

    def health(self) -> WorkerHealth:
        """Health of the worker."""
        return worker_health(self._name, 0, self._config.device)

    def close(self) -> None:
        """Release the model."""
        self._module = None

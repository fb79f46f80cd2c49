"""The best evaluations of a run: their checkpoints are kept, and a run that no longer gains ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.digests import evaluation_digest
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.parts import RunPart
from troupe.orchestrator.training.state import BestState

logger = logging.getLogger(__name__)


class BestCheckpoints(RunPart):
    """Protects the checkpoints of the best evaluations (`checkpoint.best`)."""

    name = "best"
    state: BestState

    def __init__(self, spec: RunSpec, held_out_rows: str, store: CheckpointStore) -> None:
        """`held_out_rows`: digest of the rows that are evaluated, or empty if there are none."""
        self._checkpoint = spec.checkpoint
        self._digests = evaluation_digest(spec), held_out_rows
        self._store = store
        self._not_saved: int | None = None
        """The last step whose checkpoint could not be written."""
        self._resume(BestState())

    @property
    def compares(self) -> bool:
        """Whether evaluations are compared."""
        return self._checkpoint.best is not None

    @property
    def no_gain(self) -> str:
        """Why the run ends early (`checkpoint.patience`), or empty if it does not."""
        return self.state.no_gain(self._checkpoint)

    def restore(self, state: Any) -> None:
        self._resume(BestState.model_validate(state))

    def seen(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compares the evaluation of a step with those before it."""
        config = self._checkpoint.best
        if config is None or not metrics:
            return
        value = metrics.get(config.metric)
        if value is None or not math.isfinite(value):
            logger.warning("step %d: the evaluation has no %s: it is not compared", step, config.metric)
            return
        self._before = self.state.steps
        best = self.state.seen(step, value, config.keep)
        self._keep(best.keeping(self._before) if step == self._not_saved else best)

    def lost(self, step: int) -> None:
        """Notes that the checkpoint of a step cannot be written, or has no model: the best steps stay as before."""
        self._not_saved = step
        if step in self.state.saved:
            self._keep(self.state.keeping(self._before))

    def _resume(self, state: BestState) -> None:
        best = self._checkpoint.best
        self._keep(BestState() if best is None else state.of(best, *self._digests))
        self._before = self.state.steps
        """The best steps before the last evaluation: their checkpoints are there."""

    def _keep(self, state: BestState) -> None:
        self.state = state
        self._store.protected = state.saved

"""Events for what changes from step to step in counts that the run keeps anyway."""

from __future__ import annotations

from collections.abc import Mapping

from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import Metrics, RunPart, UpdatedStep


class ChangeEvents(RunPart):
    """Records dropped and repeated samples, and changed numbers of workers, as events."""

    def __init__(self, ledger: Ledger, events: EventLog) -> None:
        """Counts from what the ledger has now."""
        self._ledger = ledger
        self._events = events
        self._dropped, self._retries = ledger.drop_reasons(), ledger.counts()["retries"]
        self._workers: dict[str, int] = {}

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """See `RunPart`; adds no metrics."""
        before, self._dropped = self._dropped, self._ledger.drop_reasons()
        for reason, samples in self._dropped.items():
            if (added := samples - before.get(reason, 0)) > 0:  # a retry takes dropped samples back
                self._events.record("dropped", reason=reason, samples=added)
        retries, self._retries = self._retries, self._ledger.counts()["retries"]
        if self._retries != retries:
            self._events.record("retry", groups=self._retries - retries)
        known, self._workers = self._workers, {k[8:]: int(v) for k, v in metrics.items() if k.startswith("workers/")}
        changed = {role: count for role, count in self._workers.items() if count != known.get(role, 0)}
        if known and changed:
            self._events.record("scaled", workers=changed)
        return {}

"""Faults of reward functions in the log: each cause once, then a count."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from troupe.orchestrator.training.ledger import kind_of
from troupe.workers.contract.messages import Fault

logger = logging.getLogger(__name__)


class FaultLog:
    """Warns about each cause when it first occurs, and when its count of samples reaches 10, 100, 1000, ..."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()

    def note(self, faults: Iterable[Fault]) -> None:
        """Counts the faults of one group."""
        for fault in faults:
            cause = kind_of(fault.cause)
            before, after = self._samples[cause], self._samples[cause] + fault.samples
            self._samples[cause] = after
            if not before:
                logger.warning("reward function %s: a sample has no reward: %s", fault.cause, fault.example)
            elif len(str(after)) > len(str(before)):
                logger.warning("reward function %s: %d samples so far", cause, after)

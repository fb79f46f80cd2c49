"""Progress of a group that is neither trained nor dropped, as a checkpoint keeps and a resumed run restores it."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.workers.contract.messages import FinishedSamples
from troupe.workers.contract.roles import TableRef


@dataclass(frozen=True)
class Samples:
    """Finished samples of one group."""

    summary: FinishedSamples
    rollouts: TableRef
    """ROLLOUTS table with their rows, maybe among other groups' rows."""


@dataclass(frozen=True)
class GroupProgress:
    """An open group with finished samples."""

    prompt_uid: str
    attempt: int
    """The attempt that the ledger has."""
    started_at_version: int
    """Weight version of the engine when its first sample started."""
    scored: ScoredGroup | None
    finished: Samples | None
    """Finished samples of a group that is not scored, maybe all of them."""

    @property
    def samples(self) -> int:
        """Number of finished samples."""
        if self.scored is not None:
            return len(self.scored.summary.samples)
        return 0 if self.finished is None else len(self.finished.summary.samples)

    def fits(self, group_size: int) -> bool:
        """Whether it is a group of this size, or a part of one."""
        if self.scored is not None:
            return len(self.scored.summary.samples) == group_size
        indices = () if self.finished is None else (one.sample_index for one in self.finished.summary.samples)
        return all(index < group_size for index in indices)

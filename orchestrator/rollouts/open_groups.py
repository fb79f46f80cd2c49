"""Groups that are neither trained nor dropped: while they run, in a checkpoint, and in the run that resumes from it."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.spec.sections import ScheduleConfig
from troupe.orchestrator.training.ledger import OpenGroup
from troupe.workers.contract.messages import FinishedSamples
from troupe.workers.contract.roles import TableRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """Finished samples of one group, maybe none, and turns of its unfinished episodes."""

    summary: FinishedSamples
    rollouts: TableRef
    """ROLLOUTS table with their rows, maybe among other groups' rows."""


@dataclass(frozen=True)
class GroupProgress:
    """An open group with finished samples, as a checkpoint keeps and a resumed run restores it."""

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
        if self.scored is not None:
            return len(self.scored.summary.samples)
        return 0 if self.finished is None else len(self.finished.summary.samples)

    def fits(self, group_size: int) -> bool:
        """Whether it is a group of this size, or a part of one."""
        if self.scored is not None:
            return len(self.scored.summary.samples) == group_size
        indices = () if self.finished is None else (one.sample_index for one in self.finished.summary.samples)
        return all(index < group_size for index in indices)


@dataclass(eq=False)
class ScheduledGroup:
    """A group of the scheduler: dispatched, and neither trained nor dropped yet."""

    order: int
    pick: PromptPick
    attempt: int
    settings: GroupSettings
    running: bool = False
    """Whether it is being generated or scored."""
    started_at_version: int = 0
    """Weight version of the engine at the start of the latest attempt, or of the attempt with the finished samples."""
    finished: Samples | None = None
    """Samples that are not sampled again: an earlier run has finished them, or all of them wait for their scores."""
    scored: ScoredGroup | None = None
    failed: int = 0
    """Samples that failed since the last batch."""

    def progress(self, partial: Samples | None) -> GroupProgress | None:
        """What a checkpoint keeps of it, or None without finished samples and turns. `partial`: its samples and turns
        that the engine has finished, if it says so."""
        # The engine may have answered before it finished the rest.
        parts = [part for part in (self.finished, partial) if part is not None]
        finished = max(parts, key=lambda part: (len(part.summary.samples), part.summary.turns), default=None)
        if self.scored is None and finished is None:
            return None
        return GroupProgress(self.pick.prompt_uid, self.attempt, self.started_at_version, self.scored, finished)


class OpenGroups:
    """The open groups of a run. Forms the next batch of them; see the scheduler's module."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        """Has no group yet. `schedule`: the groups of a step and the staleness limit."""
        self._size = schedule.prompts_per_step
        self._limit = schedule.max_staleness
        self._added = 0
        self._by_uid: dict[str, ScheduledGroup] = {}
        """All of them by prompt_uid, including the groups of the batch in training."""
        self._scored: list[ScheduledGroup] = []
        """Scored groups that are not in a batch yet."""
        self._batch: list[ScheduledGroup] = []
        """Groups of the batch that is being trained."""
        self._running: Counter[int] = Counter()
        """Number of running groups by the version at which they started; versions without any are absent."""

    @property
    def scored(self) -> int:
        """Number of scored groups that are not in a batch yet."""
        return len(self._scored)

    @property
    def failed(self) -> dict[str, int]:
        """Samples that failed since the last batch, by prompt_uid, of groups that have some."""
        return {uid: group.failed for uid, group in self._by_uid.items() if group.failed}

    def add(self, pick: PromptPick, attempt: int, settings: GroupSettings) -> ScheduledGroup:
        """Adds the group of a prompt, which runs later."""
        group = self._by_uid[pick.prompt_uid] = ScheduledGroup(self._added, pick, attempt, settings)
        self._added += 1
        return group

    def drop(self, group: ScheduledGroup) -> None:
        """Removes a group that is not trained."""
        self.mark_idle(group)
        del self._by_uid[group.pick.prompt_uid]

    def mark_running(self, group: ScheduledGroup, version: int) -> None:
        self.mark_idle(group)
        group.running, group.started_at_version = True, version
        self._running[version] += 1

    def mark_idle(self, group: ScheduledGroup) -> None:
        """Marks the group as no longer running: it is scored, dropped or about to start again."""
        if group.running:
            group.running = False
            self._running[group.started_at_version] -= 1
            if not self._running[group.started_at_version]:
                del self._running[group.started_at_version]

    def mark_scored(self, group: ScheduledGroup, scored: ScoredGroup) -> None:
        """Marks the group as ready for a batch."""
        self.mark_idle(group)
        group.scored = scored
        self._scored.append(group)

    def mark_trained(self) -> None:
        """Removes the groups of the last batch."""
        for group in self._batch:
            del self._by_uid[group.pick.prompt_uid]
        self._batch = []

    def abandon_batch(self) -> None:
        """Leaves the groups of the last batch open: they are added again."""
        self._batch = []

    def next_batch(self, version: int) -> list[ScoredGroup] | None:
        """Takes the next batch for a policy of this version, in order of dispatch, or None if it is not ready."""
        ready = self._ready(version)
        if ready is None:
            return None
        batch = [group.scored for group in ready if group.scored is not None]
        taken = set(ready)
        self._scored = [group for group in self._scored if group not in taken]
        self._batch = ready
        for group in self._by_uid.values():
            group.failed = 0
        return batch

    def progress(self, running: Sequence[tuple[Sequence[FinishedSamples], TableRef]]) -> list[GroupProgress]:
        """Progress of every group that has finished samples, in order of dispatch. `running`: finished samples of the
        running groups, by engine (`finished_samples` of the pool)."""
        partial = {(one.prompt_uid, one.attempt): Samples(one, table) for own, table in running for one in own}
        found = (group.progress(partial.get((uid, group.attempt))) for uid, group in self._by_uid.items())
        return [progress for progress in found if progress is not None]

    def _ready(self, version: int) -> list[ScheduledGroup] | None:
        """The next batch if it can be formed now: the groups that started first, and of these those opened first. It is
        not formed while more groups would be left than the batches until their limit can take."""
        size, limit = self._size, self._limit
        oldest_allowed = version - limit
        # Called whenever a group finishes: the common answer "not ready" must not scan every group.
        if len(self._scored) < size or any(v <= oldest_allowed for v in self._running):
            return None
        batch = sorted(self._scored, key=lambda group: (group.started_at_version, group.order))[:size]
        if limit > 1:
            waiting = Counter(group.started_at_version for group in self._scored) + self._running
            taken = Counter(group.started_at_version for group in batch)
            for later in range(1, limit):  # `later` batches from now, these groups are at the limit
                left = sum(waiting[v] - taken[v] for v in waiting if v <= oldest_allowed + later)
                if left > later * size:
                    return None
        return sorted(batch, key=lambda group: group.order)


class ResumedGroups:
    """Groups of the checkpoint that a run resumes from, until they are opened again."""

    def __init__(self, open_groups: Sequence[OpenGroup]) -> None:
        """`open_groups`: from the ledger; without `keep` all of them are sampled again."""
        self.waiting = deque(open_groups)
        self._kept: dict[str, GroupProgress] = {}
        self._failed: Mapping[str, int] = {}

    def keep(
        self,
        groups: Sequence[GroupProgress],
        *,
        settings: RowTable[GroupSettings],
        schedule: ScheduleConfig,
        version: int,
        failed: Mapping[str, int],
    ) -> int:
        """Keeps the finished samples of these groups, and returns how many failed ones are sampled again. A group of
        another attempt or size, and one that would exceed the staleness limit by the step whose batch it can reach, is
        sampled again like a group without progress. `failed`: failed samples of open groups, by prompt_uid."""
        known = {group.prompt_uid: (group.attempt, settings[group.row].samples) for group in self.waiting}
        usable = [
            group
            for group in sorted(groups, key=lambda group: group.started_at_version)
            if (own := known.get(group.prompt_uid)) is not None and group.attempt == own[0] and group.fits(own[1])
        ]
        # As many groups as were open at one version or before fill the next batches, the oldest first.
        for place, group in enumerate(usable):
            trained_at = version + place // schedule.prompts_per_step
            if trained_at - group.started_at_version <= schedule.max_staleness:
                self._kept[group.prompt_uid] = group
            else:
                logger.warning("sampling %s again: its samples are too old for this spec", group.prompt_uid)
        self._failed = {uid: samples for uid, samples in failed.items() if uid in self._kept}
        return sum(failed.values()) - sum(self._failed.values())

    @property
    def groups(self) -> int:
        """Number of groups that continue."""
        return len(self._kept)

    @property
    def samples(self) -> int:
        """Number of finished samples that are not sampled again."""
        return sum(group.samples for group in self._kept.values())

    def take(self, prompt_uid: str) -> tuple[GroupProgress, int] | None:
        """The progress and the failed samples of a group that continues, once, or None if it is sampled again."""
        progress = self._kept.pop(prompt_uid, None)
        return None if progress is None else (progress, self._failed.get(prompt_uid, 0))

"""Samples that were dispatched, failed or replaced since the last batch, and the bounds on them.

A step reports the sum over the groups of its batch and over the groups that were replaced for it: what fails for a
whole prompt replaces its group, and is in no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import BatchFailed
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.environments import OK

DISPATCHED, FAILED = "dispatched_samples", "failed_samples"
Counts = dict[str, float]
"""Sums by name of the metric."""
_REFUSALS_PER_GROUP = 8
"""A step with this many refused prompts per group of the batch has the wrong data, not a few bad rows."""


class StepCounts:
    """Counts since the last batch. A step in which too much fails ends."""

    def __init__(self, spec: RolloutSpec, describe_drops: Callable[[], str]) -> None:
        """Counts nothing yet. `describe_drops` returns why samples were dropped, for messages."""
        self._failable = spec.failures.max_failed_fraction * spec.samples_per_step
        self._refusable = _REFUSALS_PER_GROUP * spec.schedule.prompts_per_step
        self._replaceable = algorithms.dynamic_sampling(spec.algorithm) * spec.schedule.prompts_per_step
        """Groups without signal that may be replaced in a step."""
        self._describe_drops = describe_drops
        self._failed = 0
        self._refused = 0
        self._without_signal = 0
        self._replaced: Counts = {}
        self.replaced: Counts = {}
        """Counts of the groups that were replaced for the last batch."""

    @property
    def may_replace(self) -> bool:
        """Whether another group without signal may be replaced."""
        return self._without_signal < self._replaceable

    def state(self) -> dict[str, Any]:
        return {
            "failed_samples": self._failed,
            "refused": self._refused,
            "without_signal": self._without_signal,
            "replaced": dict(self._replaced),
        }

    def restore(self, state: Mapping[str, Any], sampled_again: int) -> None:
        """Takes over the counts of a checkpoint; a missing one is 0 (checkpoints of earlier versions). `sampled_again`:
        failed samples that are sampled again: they may not fail again."""
        self._failed = state.get("failed_samples", 0) - sampled_again
        self._refused = state.get("refused", 0)
        self._without_signal = state.get("without_signal", 0)
        self._replaced = dict(state.get("replaced", {}))

    def begin_batch(self) -> None:
        self._failed = self._refused = self._without_signal = 0
        self.replaced, self._replaced = self._replaced, {}

    def batch_lost(self) -> None:
        """Counts what was replaced for the last batch again, because the batch is sampled again."""
        add(self._replaced, self.replaced)

    def fail(self, samples: int) -> None:
        """Counts failed samples. Raises BatchFailed if this step has too many."""
        self._failed += samples
        if self._failed > self._failable:
            raise BatchFailed(
                f"{self._failed} samples of this step failed, more than failures.max_failed_fraction allows "
                f"({self._failable:.0f}); reasons so far: {self._describe_drops()}"
            )

    def refuse(self, reason: str) -> None:
        """Counts a refused prompt. Raises BatchFailed if this step has too many."""
        self._refused += 1
        if self._refused > self._refusable:
            raise BatchFailed(
                f"{self._refused} prompts of this step were refused, more than {_REFUSALS_PER_GROUP} for each group of "
                f"the batch; check the data; the last: {reason}"
            )

    def replace_without_signal(self, group: ScoredGroup, settings: GroupSettings) -> None:
        """Counts a scored group that is replaced because it has no signal."""
        self._without_signal += 1
        add(self._replaced, sample_counts(group, settings.environment))

    def replace_failed(self, group: ScoredGroup | None, settings: GroupSettings) -> None:
        """Counts a group that is replaced because of a failure, and its samples. Raises BatchFailed. `group`: the group
        if its rewards have failed, or None if its samples were never scored."""
        add(self._replaced, replaced_counts(settings.samples, group, settings.environment))
        self.fail(settings.samples)


def add(total: Counts, counts: Mapping[str, float]) -> None:
    """Adds counts to a total, including counts of 0."""
    for name, count in counts.items():
        total[name] = total.get(name, 0.0) + count


def sample_counts(group: ScoredGroup, environment: str | None) -> Counts:
    """Counts of a scored group, zeros included. `environment`: name of the environment that its samples are episodes in
    (empty if unnamed), or None if they are single responses. Returns its samples, and those without a reward; the time
    of the reward worker (s); its candidates without a reward if it has candidates; episodes that failed and that
    started again, and the same by environment if this has a name."""
    statuses = group.rewards.statuses
    counts: Counts = {
        DISPATCHED: float(len(statuses)),
        FAILED: float(len(statuses) - statuses.count("ok")),
        "seconds/reward": group.rewards.seconds,
    }
    if group.candidates is not None:
        counts["candidates/failed"] = float(sum(reward is None for reward in group.candidates.rewards))
    played = [(sample, sample.episode) for sample in group.summary.samples if sample.episode is not None]
    if environment is None or not played:
        return counts
    failed = float(sum(sample.status != OK for sample, _ in played))
    restarted = float(sum(episode.restarts > 0 for _, episode in played))
    for part in ("", f"/{environment}") if environment else ("",):
        counts |= {f"episodes{part}/failed": failed, f"episodes{part}/restarted": restarted}
    return counts


def replaced_counts(samples: int, group: ScoredGroup | None, environment: str | None) -> Counts:
    """Counts of a group that is replaced because of a failure: it takes all of its samples with it. `group`: the group
    if its rewards have failed, or None if its samples were never scored."""
    if group is None:
        return {DISPATCHED: float(samples)}
    counts = sample_counts(group, environment)
    counts[FAILED] = counts[DISPATCHED]
    return counts

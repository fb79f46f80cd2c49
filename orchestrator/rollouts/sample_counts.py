"""Counts of a group's dispatched and failed samples, and the time of scoring, by name of the metric.

A step reports the sum over the groups of its batch and over the groups that were replaced for it: what fails for a
whole prompt replaces its group, and is in no batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.workers.contract.environments import OK

DISPATCHED, FAILED = "dispatched_samples", "failed_samples"
Counts = dict[str, float]


def add(total: Counts, counts: Mapping[str, float]) -> None:
    """Adds counts to a total, including counts of 0."""
    for name, count in counts.items():
        total[name] = total.get(name, 0.0) + count


def sample_counts(group: ScoredGroup, environment: str | None) -> Counts:
    """Counts of a scored group, zeros included.

    Args:
        group: The group.
        environment: Name of the environment that its samples are episodes in (empty if unnamed), or None if they
            are single responses.

    Returns:
        Its samples, and those without a reward; the time of the reward worker (s); its candidates without a reward
        if it has candidates; episodes that failed and that started again, and the same by environment if this has
        a name.
    """
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
    """Counts of a group that is replaced because of a failure: it takes all of its samples with it.

    Args:
        samples: Samples of the group.
        group: The group if its rewards have failed, or None if its samples were never scored.
        environment: Name of its environment, as in `sample_counts`.
    """
    if group is None:
        return {DISPATCHED: float(samples)}
    counts = sample_counts(group, environment)
    counts[FAILED] = counts[DISPATCHED]
    return counts

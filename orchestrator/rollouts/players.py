"""What a step says of the players of a game."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.spec.derived.sampling import GroupSettings


def player_metrics(groups: Sequence[ScoredGroup], settings: RowTable[GroupSettings]) -> dict[str, float]:
    """Mean reward and shares of won and drawn episodes of each player that the policy plays; empty without a game.
    `settings`: environment of each row. The players of a named one have its name in theirs."""
    rewards: dict[str, list[float]] = {}
    outcomes: dict[str, list[float]] = {}
    for group in groups:
        environment = settings[group.row].environment
        for sample, reward in zip(group.summary.samples, group.rewards.rewards, strict=True):
            if not sample.player or reward is None:
                continue
            player = f"{environment}.{sample.player}" if environment else sample.player
            rewards.setdefault(player, []).append(reward)
            if sample.episode is not None and sample.episode.outcome is not None:
                outcomes.setdefault(player, []).append(sample.episode.outcome)
    metrics = {f"players/{player}/reward": fmean(values) for player, values in rewards.items()}
    for player, values in outcomes.items():
        metrics[f"players/{player}/wins"] = fmean(value == 1.0 for value in values)
        metrics[f"players/{player}/draws"] = fmean(value == 0.5 for value in values)
    return metrics

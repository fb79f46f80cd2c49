"""Groups of a game: each player's samples are compared with each other, and have metrics of their own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fakes import FakeTable
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.rollouts.players import player_metrics
from troupe.orchestrator.rollouts.scoring import ScoredGroup, SignalTest
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.workers.contract.messages import EpisodeSummary, GroupSummary, RewardSummary, SampleSummary

TABLE = FakeTable("rollouts", ("e0-r0",))


def group(rewards: Sequence[float | None], players: Sequence[str] = ("white", "black")) -> ScoredGroup:
    """Games one after another, a sample for each player; `white` wins with a reward above 0."""
    samples = []
    for index, reward in enumerate(rewards):
        outcome = None if reward is None else 0.5 + (reward > 0) / 2 - (reward < 0) / 2
        episode = EpisodeSummary(1, 5, 10, 0, 0.0, outcome=outcome)
        player = players[index % len(players)] if players else ""
        samples.append(SampleSummary(index, 10, 5, "stop", 0, 0, episode=episode, player=player))
    statuses = tuple("error" if reward is None else "ok" for reward in rewards)
    scored = RewardSummary("e0-r0", 0, statuses, tuple(rewards), {"environment": tuple(rewards)})
    return ScoredGroup(GroupSummary("e0-r0", 0, "rollout-0", tuple(samples), 1.0), scored, TABLE, TABLE, ())


@pytest.mark.parametrize(
    ("rewards", "players", "signal"),
    [
        ((-1.0, 1.0, -1.0, 1.0), ("white", "black"), False),
        ((-1.0, 1.0, 1.0, -1.0), ("white", "black"), True),
        ((-1.0, 1.0, None, 1.0), ("white", "black"), False),
        ((-1.0, 1.0, -1.0, 1.0), (), True),
    ],
)
def test_a_group_has_signal_if_the_samples_of_a_player_differ(
    rewards: Sequence[float | None], players: Sequence[str], signal: bool
) -> None:
    found = group(rewards, players)
    assert found.has_signal is signal
    for component in (None, "environment"):
        problem = SignalTest().problem(found, GroupSettings(4, signal_in=component))
        assert bool(problem) is not signal


def test_a_group_is_as_large_as_the_samples_of_its_smallest_player() -> None:
    assert group((1.0, None, 1.0, None, 1.0, 2.0)).least_rewarded == 1
    assert group((1.0, None, 1.0, None, 1.0, 2.0), ()).least_rewarded == 4


def test_metrics_of_each_player() -> None:
    groups = [group((2.0, -2.0, -1.0, 1.0)), group((0.0, 0.0, None, None))]
    assert player_metrics(groups, RowTable.of((0,), (GroupSettings(4, environment=""),))) == {
        "players/white/reward": pytest.approx(1 / 3),
        "players/black/reward": pytest.approx(-1 / 3),
        "players/white/wins": pytest.approx(1 / 3),
        "players/black/wins": pytest.approx(1 / 3),
        "players/white/draws": pytest.approx(1 / 3),
        "players/black/draws": pytest.approx(1 / 3),
    }
    named = player_metrics(groups, RowTable.of((0,), (GroupSettings(4, environment="chess"),)))
    assert "players/chess.white/wins" in named
    assert player_metrics([group((1.0, 0.0), ())], RowTable.of((0,), (GroupSettings(2, environment=""),))) == {}

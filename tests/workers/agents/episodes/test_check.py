"""`troupe env check` plays what a run plays: the same worker, and the same end of an episode."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from tests.workers.agents.episodes.test_conversation import tokenizer_of
from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.episodes.check import Rehearsal, rehearse
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.agents.episodes.turns import Played
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.environment import EnvironmentWorker

ROWS = [Row(({"role": "user", "content": str(number)},), "5", {}, seed=number) for number in range(3)]


class OverAtStart(Environment):
    """Nothing is left to do, as a reset of a game can find."""

    def start(self, row: Row) -> Observation:
        """The end."""
        return Observation(row.messages, reward=1.0, done=True)

    def step(self, message: Message) -> Observation:
        """Not reached."""
        return Observation(done=True, reward=1.0)


class OneTurn(Environment):
    """Gives its process as information."""

    def start(self, row: Row) -> Observation:
        """The row."""
        return Observation(row.messages, info={"process": os.getpid()})

    def step(self, message: Message) -> Observation:
        """The end."""
        return Observation(done=True, reward=1.0)


def played_in(name: str, said: Sequence[str] = ("Done.",), **players: str) -> list[Played]:
    config = EnvironmentConfig.model_validate({"name": name, "turn_timeout_s": 20.0, "players": players})
    rehearsal = Rehearsal(config, TurnReader(tokenizer_of("chatml")), 64, 1024)
    return asyncio.run(rehearse(rehearsal, EnvironmentWorker(config, "check"), ROWS, said))


def test_an_environment_that_is_done_at_its_start_fails_as_in_a_run() -> None:
    why = "start: it is done before the policy's first turn, which leaves nothing to train"
    assert [(one.status, one.restarts) for one in played_in(f"{__name__}:OverAtStart")] == [
        (f"environment: turn 0: {why}", 0)
    ] * 3


def test_episodes_follow_each_other_in_a_process_as_in_a_run() -> None:
    played = played_in(f"{__name__}:OneTurn")
    assert [one.status for one in played] == ["ok"] * 3
    assert len({one.info["process"] for one in played}) < 3


def test_the_turns_of_a_frozen_player_are_said_and_have_no_tokens() -> None:
    said = ["I want shoes.", "Here.", "###STOP###"]
    (played, *_) = played_in("user_simulator", said, assistant="policy", user="judge")
    assert (played.status, played.sides["user"].sampled_tokens) == ("ok", 0)
    assert [message["content"] for message in played.sides["assistant"].messages] == said[:2]

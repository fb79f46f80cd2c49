"""`troupe env check` plays what a run plays: the same worker, and the same end of an episode."""

from __future__ import annotations

import asyncio
import os

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


def played_in(environment: type[Environment]) -> list[Played]:
    config = EnvironmentConfig(name=f"{__name__}:{environment.__name__}", turn_timeout_s=20.0)
    rehearsal = Rehearsal(config, TurnReader(tokenizer_of("chatml")), 64, 1024)
    return asyncio.run(rehearse(rehearsal, EnvironmentWorker(config, "check"), ROWS, ["Done."]))


def test_an_environment_that_is_done_at_its_start_fails_as_in_a_run() -> None:
    why = "start: it is done before the policy's first turn, which leaves nothing to train"
    assert [(one.status, one.restarts) for one in played_in(OverAtStart)] == [(f"environment: turn 0: {why}", 0)] * 3


def test_episodes_follow_each_other_in_a_process_as_in_a_run() -> None:
    played = played_in(OneTurn)
    assert [one.status for one in played] == ["ok"] * 3
    assert len({one.info["process"] for one in played}) < 3

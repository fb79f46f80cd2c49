"""An episode that is played again gets its recorded turns for the same requests, and new turns for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.workers.agents.episodes.test_episode import USER, Script, play, reply, sampled
from troupe.workers.agents.episodes.turns import RecordedTurns, SampledTurn, TurnLimits
from troupe.workers.contract.config import StructuredConfig
from troupe.workers.contract.environments import EnvironmentGone, EpisodeReply

THREE: list[EpisodeReply | Exception] = [reply(USER, reward=0.25), reply(USER), reply(done=True, reward=1.0)]


class Engine:
    """Samples the scripted turns, and counts them."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    async def sample(self, ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        self.numbers.append(limits.number)
        return await sampled(ids, limits)


def played(recorded: RecordedTurns, engine: Engine, script: Script, **bounds: Any) -> Any:
    return play(script, partial(recorded.sample, engine.sample), **bounds)


def test_an_episode_that_is_played_again_samples_only_what_is_not_recorded() -> None:
    recorded, first = RecordedTurns(), Engine()
    whole = played(recorded, first, Script(THREE))
    assert first.numbers == [0, 1, 2]

    again, second = RecordedTurns(list(recorded.by_request.items())[:2]), Engine()
    assert replace(played(again, second, Script(THREE)), environment_s=whole.environment_s) == whole
    assert second.numbers == [2] and again.by_request == recorded.by_request


def test_turns_after_another_answer_of_the_environment_are_sampled() -> None:
    recorded, engine = RecordedTurns(), Engine()
    played(recorded, Engine(), Script(THREE))
    played(recorded, engine, Script([reply(USER, USER), *THREE[1:]]))
    assert engine.numbers == [1, 2]


def test_an_episode_whose_worker_is_lost_keeps_its_turns() -> None:
    engine = Engine()
    whole = played(RecordedTurns(), engine, Script([THREE[0], EnvironmentGone("it died"), *THREE]))
    assert engine.numbers == [0, 1, 2] and whole.restarts == 1 and whole.status == "ok"


@pytest.mark.parametrize(
    "other",
    [
        ((1, 2), TurnLimits(1, 3)),
        ((1, 2), TurnLimits(0, 2)),
        ((1, 2), TurnLimits(0, 3, ("x",))),
        ((1, 2), TurnLimits(0, 3, structured=StructuredConfig(regex="a"))),
        ((1, 3), TurnLimits(0, 3)),
        ((1, 2, 0), TurnLimits(0, 3)),
    ],
)
async def test_a_request_with_other_tokens_or_limits_is_another_one(other: tuple[tuple[int, ...], TurnLimits]) -> None:
    recorded, engine = RecordedTurns(), Engine()
    for request in (((1, 2), TurnLimits(0, 3)), other, other):
        await recorded.sample(engine.sample, *request)
    assert len(engine.numbers) == len(recorded.by_request) == 2

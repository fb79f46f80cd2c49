"""Games of several players in one episode: who sees what, whose tokens, rewards and outcome a sample has."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from tests.workers.agents.episodes.test_episode import ROW, USER, Reader, Script, reply, sampled
from troupe.workers.agents.episodes.episode import EpisodeRunner
from troupe.workers.agents.episodes.turns import Played, SampledTurn, TurnLimits
from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Observation, read_observation
from troupe.workers.contract.judges import JudgeAnswer
from troupe.workers.contract.rewards import Feedback

GAME = EpisodeConfig(players={"white": "policy", "black": "policy"})


def play(script: Script, config: EpisodeConfig = GAME) -> Played:
    with ThreadPoolExecutor(1) as tokenizing:
        runner = EpisodeRunner(config, 3, 100, Reader(), tokenizing, lambda: script)
        return asyncio.run(runner.play("key", ROW, sampled))


def script(*replies: Any, **first: Any) -> Script:
    begins: list[EpisodeReply | Exception] = [reply(*ROW.messages, **({"player": "white"} | first))]
    return Script(list(replies), begins)


def test_each_player_has_its_turns_prompt_and_reward() -> None:
    ended = reply(USER, rewards={"white": -1.0, "black": Feedback(1.0, "too late")}, done=True)
    played = play(script(reply(USER, player="black"), reply(USER, player="white"), ended))
    assert (played.status, played.finish_reason, played.sampled_turns) == ("ok", "stop", 3)
    white, black = (played.sample(player) for player in ("white", "black"))
    (row,) = white.segments
    assert (row.prompt_ids, row.response_ids) == ([1, 2], [10, 11, 12, 8, 9, 30, 31, 32])
    assert row.loss_mask == [True] * 3 + [False] * 2 + [True] * 3, "what black said is no part of white's row"
    assert (row.rewards, white.outcome("white")) == ([(8, -1.0, "")], None)
    (other,) = black.segments
    assert (other.prompt_ids, other.response_ids, other.rewards) == ([1, 2], [20, 21, 22], [(3, 1.0, "too late")])
    assert [message["content"] for message in black.messages] == ["more", "20 21 22"]
    assert (white.response, black.response) == ("30 31 32", "20 21 22")
    assert [played.outcome(player) for player in ("white", "black")] == [0.0, 1.0]
    assert (black.status, black.finish_reason, len(black.turns)) == ("ok", "stop", 1)


def test_players_move_at_the_same_time() -> None:
    asked = [Observation([USER], player="black")]
    one = script(reply(rewards={"white": 2.0, "black": 2.0}, done=True), also=asked)
    played = play(one)
    assert [turn["content"] for turn in (one.heard[0], *one.heard[0]["also"])] == ["10 11 12", "20 21 22"]
    assert [side.segments[0].rewards for side in played.sides.values()] == [[(3, 2.0, "")]] * 2
    assert played.outcome("white") == 0.5


def test_a_reward_without_a_player_is_the_last_ones() -> None:
    played = play(script(reply(USER, player="black", reward=0.5), reply(reward=1.0, done=True)))
    assert {name: side.rewards for name, side in played.sides.items()} == {
        "white": [(3, 0.5, "")],
        "black": [(3, 1.0, "")],
    }


def test_a_player_without_a_turn_has_a_reward_and_no_tokens() -> None:
    played = play(script(reply(rewards={"white": -1.0, "black": 1.0}, done=True)))
    black = played.sample("black")
    assert (black.segments[0].response_ids, black.rewards, black.turns) == ([], [(0, 1.0, "")], [])


def test_the_turns_of_all_players_count() -> None:
    played = play(
        script(reply(USER, player="black"), reply(USER, player="white")), GAME.model_copy(update={"max_turns": 2})
    )
    assert (played.finish_reason, played.sample("black").finish_reason) == ("max_turns", "max_turns")
    assert played.sampled_turns == 2


@pytest.mark.parametrize(
    ("replies", "config", "status"),
    [
        ([reply(USER)], GAME, "no player is named whose turn it is, one of white, black"),
        ([reply(USER, player="red")], GAME, "there is no player 'red' in roles.environment.players (white, black)"),
        ([reply(rewards={"red": 1.0}, done=True)], GAME, "there is no player 'red'"),
        ([], EpisodeConfig(), "there is no player 'white' in roles.environment.players (none)"),
    ],
)
def test_a_player_that_is_missing_or_unknown_fails_all_of_them(
    replies: Sequence[Any], config: EpisodeConfig, status: str
) -> None:
    played = play(script(*replies), config)
    assert status in played.status
    assert played.sample("white").status == played.status
    assert played.sample("black").status == played.status


def test_a_reward_at_the_start_is_for_no_turn() -> None:
    for reward in (1.0, Feedback(1.0, "well begun")):
        assert "start: the reward 1 is for no turn" in play(script(rewards={"black": reward})).status


def test_what_is_said_with_a_reward_crosses_the_process() -> None:
    """An empty text leaves the number alone, and half a character keeps its escape."""
    told = Observation(
        reward=Feedback(1, "caf\udce9"), rewards={"black": Feedback(0.5, ""), "white": Feedback(2, "won")}
    )
    once = read_observation(told)
    read = read_observation(json.loads(json.dumps(asdict(once))))
    assert once == read and read.reward == Feedback(1.0, "caf\\udce9")
    assert read.rewards == {"black": 0.5, "white": Feedback(2.0, "won")}
    for reward, why in (
        (Feedback(1.0, 7), "reward: feedback that is not text: int"),  # pyright: ignore[reportArgumentType]
        (Feedback(None, "lost"), "reward: expected a number, got NoneType"),
        (Feedback(math.inf, "lost"), "reward: not a finite number: inf"),
        ({"reward": 1.0}, "reward: expected a number, got dict"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(why)):
            read_observation({"reward": reward})


def test_observations_with_players_cross_the_process() -> None:
    given = {"player": "white", "rewards": {"black": 1}, "also": [{"player": "black", "messages": [USER]}]}
    read = read_observation(json.loads(json.dumps(given)))
    assert (read.player, read.rewards, read.also[0].player, read.also[0].restart) == (
        "white",
        {"black": 1.0},
        "black",
        False,
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"player": ""}, "player: expected a name"),
        ({"player": 1}, "player: expected a name"),
        ({"rewards": {"white": float("nan")}}, "rewards.white: not a finite number"),
        ({"player": "white", "also": [{"player": "white", "messages": [USER]}]}, "two turns of one conversation"),
    ],
)
def test_malformed_players_are_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        read_observation(given)


@pytest.mark.parametrize("failure", ["", "judge-0 did not answer in 5 s"])
def test_a_frozen_opponent_plays_by_what_it_has_seen(failure: str) -> None:
    """Its turns are texts without tokens; a turn that it does not make fails the episode."""
    config = EpisodeConfig(players={"white": "policy", "black": "judge"})
    asked: list[tuple[list[str], int]] = []

    async def opponent(messages: list[Message], number: int) -> JudgeAnswer:
        asked.append(([message["content"] for message in messages], number))
        return JudgeAnswer(failure=failure) if failure else JudgeAnswer(f"move {number}")

    again = {"role": "user", "content": "again"}
    game = script(
        *(reply(USER, player="black"), reply(USER, player="white"), reply(again, player="black")),
        reply(rewards={"white": 1.0, "black": -1.0}, done=True),
    )
    with ThreadPoolExecutor(1) as tokenizing:
        runner = EpisodeRunner(config, 3, 100, Reader(), tokenizing, lambda: game, opponent=opponent)
        played = asyncio.run(runner.play("key", ROW, sampled))
    if failure:
        assert played.status.startswith(f"environment: turn 1: black: {failure}")
        return
    assert asked == [(["more"], 1), (["more", "move 1", "again"], 3)]
    assert [turn["content"] for turn in game.heard] == ["10 11 12", "move 1", "30 31 32", "move 3"]
    white = played.sample("white")
    assert (white.status, white.segments[0].loss_mask.count(True), played.outcome("white")) == ("ok", 6, 1.0)
    assert config.trained == ("white",)


def test_an_opponent_at_the_same_time_has_seen_the_question() -> None:
    config = EpisodeConfig(players={"white": "policy", "black": "judge"})

    async def opponent(messages: list[Message], number: int) -> JudgeAnswer:
        return JudgeAnswer(" ".join(message["content"] for message in messages))

    game = script(reply(rewards={"white": 1.0}, done=True), also=[Observation([USER], player="black")])
    with ThreadPoolExecutor(1) as tokenizing:
        runner = EpisodeRunner(config, 3, 100, Reader(), tokenizing, lambda: game, opponent=opponent)
        asyncio.run(runner.play("key", ROW, sampled))
    assert game.heard[0]["also"][0]["content"] == "more"


def test_turns_have_seeds_of_their_own() -> None:
    numbers: list[int] = []

    async def noted(ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        numbers.append(limits.number)
        return await sampled(ids, limits)

    game = script(reply(USER, player="black"), reply(USER, player="white"), reply(rewards={"white": 1.0}, done=True))
    with ThreadPoolExecutor(1) as tokenizing:
        asyncio.run(EpisodeRunner(GAME, 3, 100, Reader(), tokenizing, lambda: game).play("key", ROW, noted))
    assert numbers == [0, 1, 2]

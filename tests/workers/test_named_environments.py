"""A rollout worker with several environments: each group is played in the one that its request names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.real.rollout_helpers import chat, prompt_table, rollout_config
from troupe.workers.agents.episodes.turns import SampledTurn
from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Observation, Row
from troupe.workers.contract.judges import JudgeAnswer, JudgeGone, Question
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.data.chat import turn_seed
from troupe.workers.engine import generation
from troupe.workers.engine.opponent import Opponent
from troupe.workers.engine.serving import Serving
from troupe.workers.rollout import RolloutWorker

BOUNDS = {
    "short": EpisodeConfig(max_turns=1, truncated_turns="continue"),
    "long": EpisodeConfig(max_turns=3, truncated_turns="continue"),
}


class Endless:
    """The link to an environment that says its name after every turn, and ends no episode."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = 0

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        self.begun += 1
        return f"environment.{self.name}-0", EpisodeReply(Observation(row.messages))

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        assert worker == f"environment.{self.name}-0"
        return EpisodeReply(Observation([{"role": "user", "content": self.name}], reward=1.0))

    def end(self, worker: str, episode: str) -> None:
        assert worker == f"environment.{self.name}-0"


@pytest.fixture
def worker(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutWorker:
    """A worker without an engine, for which every turn is the same two tokens."""
    worker = RolloutWorker(rollout_config(tiny_model).model_copy(update={"episodes": BOUNDS}), "rollout-0")
    worker.generation.load()
    engine: Any = SimpleNamespace(errored=False)
    worker.engine.vllm, worker.engine.state = engine, Serving.OPEN

    async def sample(*_: Any) -> SampledTurn:
        return SampledTurn([40, 41], [-1.0, -1.0], [{"version": 0, "start": 0, "end": 2}], "length")

    monkeypatch.setattr(worker.generation, "_sample", sample)
    monkeypatch.setattr(generation, "sampled_turn", lambda turn, *_: turn)
    return worker


@pytest.mark.parametrize(("name", "turns"), [("short", 1), ("long", 3)])
def test_a_group_is_played_in_the_environment_that_it_names(worker: RolloutWorker, name: str, turns: int) -> None:
    """With the bounds and the workers of that one."""
    links = {each: Endless(each) for each in BOUNDS}
    request = GroupRequest("p0", 0, 0, samples=3, seed=1, environment=name)

    async def go() -> Any:
        for each, link in links.items():
            await worker.connect_environments(each, link)
        return await worker.generate(request, prompt_table(chat("Go.")))

    summary, table = asyncio.run(go())
    assert {each: link.begun for each, link in links.items()} == {each: 3 * (each == name) for each in BOUNDS}
    assert [sample.episode.turns for sample in summary.samples] == [turns] * 3
    assert {sample.finish_reason for sample in summary.samples} == {"max_turns"}
    for row in table.to_pylist():
        said = [turn["name"] for turn in row["turns"]]
        assert said == ["assistant", "environment"] * (turns - 1) + ["assistant"]


def test_each_player_of_a_game_is_a_sample(worker: RolloutWorker) -> None:
    """Three games of a white that moves first and a black, who has played one frame when the game ends."""
    players: dict[str, Literal["policy", "judge"]] = {"white": "policy", "black": "policy"}
    bounds = {"game": EpisodeConfig(truncated_turns="continue", players=players)}
    worker.generation.config = worker.generation.config.model_copy(update={"episodes": bounds})
    worker.generation.load()

    class Game(Endless):
        async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
            self.begun += 1
            return "environment.game-0", EpisodeReply(Observation(row.messages, player="white"))

        async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
            if message["usage"]["prompt_tokens"] == lengths["black"]:
                return EpisodeReply(Observation(rewards={"white": -1.0, "black": 1.0}, done=True))
            return EpisodeReply(Observation([{"role": "user", "content": "Black, it is your turn."}], player="black"))

    link, prompts = Game("game"), prompt_table(chat("Go."))
    tokenizer: Any = worker.generation.tokenizer
    black = [{"role": "user", "content": "Black, it is your turn."}]
    lengths = {"black": len(tokenizer.apply_chat_template(black, add_generation_prompt=True)["input_ids"])}
    request = GroupRequest("p0", 0, 0, samples=6, seed=1, environment="game")

    async def go() -> Any:
        await worker.connect_environments("game", link)
        return await worker.generate(request, prompts)

    summary, table = asyncio.run(go())
    assert link.begun == 3
    assert [(one.sample_index, one.player) for one in summary.samples] == list(enumerate(["white", "black"] * 3))
    assert [one.episode.outcome for one in summary.samples] == [0.0, 1.0] * 3
    assert table["player"].to_pylist() == ["white", "black"] * 3
    assert table["sample_index"].to_pylist() == list(range(6))
    assert [[span["reward"] for span in spans] for spans in table["turn_rewards"].to_pylist()] == [[-1.0], [1.0]] * 3
    assert len(set(map(tuple, table["prompt_ids"].to_pylist()))) == 2

    async def resumed() -> Any:
        done = tuple(sample for sample in summary.samples if sample.sample_index < 4)
        return await worker.generate(replace(request, attempt=1, finished=done), prompts, table)

    again, merged = asyncio.run(resumed())
    assert link.begun == 4, "two games were finished"
    assert [one.player for one in again.samples] == ["white", "black"] * 3
    same = ("sample_index", "player", "prompt_ids", "response_ids", "turn_rewards")
    assert merged.select(same).equals(table.select(same))


def test_an_opponent_waits_for_a_judge_and_asks_with_the_seed_of_its_turn() -> None:
    asked: list[Question] = []

    class Coming:
        name = "judge"

        def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
            raise AssertionError("it would hold a thread")

        async def turn(self, question: Question, timeout_s: float) -> JudgeAnswer:
            asked.append(question)
            if len(asked) == 1:
                raise JudgeGone("no judge worker is running")
            return JudgeAnswer("b")

    opponent = Opponent(Coming, seed=3, index=2, timeout_s=5.0)
    said = [{"role": "user", "content": "Q"}]
    assert asyncio.run(opponent(said, 1)).text == "b"
    assert asked == [Question(said, turn_seed(3, 2, 1))] * 2


def test_an_environment_without_workers_fails_its_own_groups_alone(worker: RolloutWorker) -> None:
    """Its episodes end at their deadline."""
    link, prompts = Endless("short"), prompt_table(chat("Go."))
    soon = {name: one.model_copy(update={"episode_timeout_s": 2.0}) for name, one in BOUNDS.items()}
    worker.generation.config = worker.generation.config.model_copy(update={"episodes": soon})

    async def go() -> list[list[str]]:
        await worker.connect_environments("short", link)
        requests = [GroupRequest(name, 0, 0, samples=2, seed=1, environment=name) for name in BOUNDS]
        found = await asyncio.gather(*(worker.generate(request, prompts) for request in requests))
        return [[sample.status for sample in summary.samples] for summary, _ in found]

    short, long = asyncio.run(go())
    assert short == ["ok", "ok"]
    assert all("no environment worker is connected" in status for status in long), long

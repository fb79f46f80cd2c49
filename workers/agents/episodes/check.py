"""Episodes without an engine, to check an environment: with turns from a script, or with random tokens.

Everything but the turns is a run's: the environment worker, the episode and the reader of turns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.agents.episodes.episode import EpisodeRunner, Opponent, SampleTurn
from troupe.workers.agents.episodes.turns import Played, SampledTurn, TurnLimits
from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Row
from troupe.workers.contract.judges import JudgeAnswer
from troupe.workers.data.turn_ends import turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RANDOM_TOKENS = 24


@dataclass(frozen=True)
class Rehearsal:
    """What the episodes are played with."""

    config: EpisodeConfig
    reader: TurnReader
    max_tokens: int
    max_model_len: int


class Server(Protocol):
    """The environment worker of a run, in this process."""

    async def start(self) -> object:
        """Loads the environment. Raises ValueError."""
        ...

    async def begin(self, episode: str, row: Row) -> EpisodeReply:
        """Starts an episode; the first observation."""
        ...

    async def step(self, episode: str, message: Message) -> EpisodeReply:
        """The answer to a turn."""
        ...

    async def end(self, episode: str) -> None:
        """Closes an episode."""
        ...

    async def close(self) -> None:
        """Ends all episodes and processes."""
        ...


class _Direct:
    """The link to a worker in the same process."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ending = set[asyncio.Task[None]]()

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        return "", await self._server.begin(episode, row)

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        return await self._server.step(episode, message)

    def end(self, worker: str, episode: str) -> None:
        task = asyncio.ensure_future(self._server.end(episode))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def rehearse(
    rehearsal: Rehearsal, server: Server, rows: Sequence[Row], said: Sequence[str], seed: int = 0
) -> list[Played]:
    """Play one episode for every row, with the texts in `said` as turns, the last one again and again, or with random
    tokens if there are none. Starts and closes the server. Raises ValueError if the environment cannot be loaded."""
    reader, sizes = rehearsal.reader, (rehearsal.max_tokens, rehearsal.max_model_len)
    rng, played, link = random.Random(seed), list[Played](), _Direct(server)
    try:
        await server.start()
        with ThreadPoolExecutor(1) as tokenizing:
            for number, row in enumerate(rows):
                turns = _scripted(reader.tokenizer, said) if said else _random(reader.tokenizer, rng)
                opponent = _opponent(turns, reader.tokenizer)
                runner = EpisodeRunner(rehearsal.config, *sizes, reader, tokenizing, lambda: link, opponent=opponent)
                played.append(await runner.play(f"check/{number}", row, _sampler(turns)))
    finally:
        await server.close()
    return played


def _sampler(turns: Iterator[list[int]]) -> SampleTurn:
    async def sample(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        ids = next(turns)
        reason = "length" if len(ids) > limits.max_tokens else "stop"
        ids = ids[: limits.max_tokens]
        return SampledTurn(ids, [0.0] * len(ids), [{"version": 0, "start": 0, "end": len(ids)}], reason)

    return sample


def _opponent(turns: Iterator[list[int]], tokenizer: PreTrainedTokenizerBase) -> Opponent:
    """A frozen model that says the next turn."""

    async def answer(messages: list[Message], number: int) -> JudgeAnswer:
        return JudgeAnswer(str(tokenizer.decode(next(turns), skip_special_tokens=True)))

    return answer


def _scripted(tokenizer: PreTrainedTokenizerBase, said: Sequence[str]) -> Iterator[list[int]]:
    own = turn_ends(tokenizer).own
    end = [] if own is None else [own]
    number = 0
    while True:
        ids: Any = tokenizer(said[min(number, len(said) - 1)], add_special_tokens=False)["input_ids"]
        yield list(ids) + end
        number += 1


def _random(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Iterator[list[int]]:
    ends = sorted(turn_ends(tokenizer).ids)
    while True:
        end = rng.sample(ends, min(1, len(ends)))
        yield [*(rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, _RANDOM_TOKENS))), *end]


@dataclass(frozen=True)
class TokenStretch:
    """Consecutive tokens of one author."""

    row: int
    """Row of the episode, from 0."""
    name: str
    """Who wrote them: `prompt`, `assistant`, `environment` ..."""
    ids: Sequence[int]
    loss: bool
    text: str
    reward: float | None = None
    """Reward of the turn, or None if it has none."""
    player: str = ""
    """Player of a game whose row it is, or empty."""


def stretches(played: Played, tokenizer: PreTrainedTokenizerBase) -> list[TokenStretch]:
    """The tokens of an episode by author, in order; of a game, those of one player after the other."""
    sides = played.sides or {"": played}
    return [replace(part, player=player) for player, side in sides.items() for part in _stretches(side, tokenizer)]


def _stretches(played: Played, tokenizer: PreTrainedTokenizerBase) -> list[TokenStretch]:
    found, rewards, before = list[TokenStretch](), {end: reward for end, reward, _ in played.rewards}, 0

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    for row, segment in enumerate(played.segments):
        found.append(TokenStretch(row, "prompt", segment.prompt_ids, loss=False, text=text(segment.prompt_ids)))
        for turn in segment.turns:
            own, sampled = segment.response_ids[turn["start"] : turn["end"]], turn["name"] == "assistant"
            reward = rewards.get(before + turn["end"]) if sampled else None
            found.append(TokenStretch(row, turn["name"], own, sampled, text(own), reward))
        before += len(segment.response_ids)
    return found


def describe(played: Played, parts: Sequence[TokenStretch]) -> list[str]:
    """The episode as lines: every stretch of tokens with who wrote it and whether it has loss, rewards and status."""
    lines, rows, player = list[str](), len(played.segments), ""
    for part in parts:
        if part.player != player:
            player, rows = part.player, len(played.sides[part.player].segments)
            lines.append(f"player {player}")
        if rows > 1 and part.name == "prompt":
            lines.append(f"row {part.row + 1} of {rows}")
        shown = " ".join(map(str, part.ids[:12])) + (" ..." if len(part.ids) > 12 else "")
        mask = "loss" if part.loss else "no loss"
        lines.append(f"  {part.name:<11} {len(part.ids):>5} tokens, {mask:<7}  [{shown}]\n    {part.text!r}")
        if part.reward is not None:
            lines.append(f"  reward {part.reward:g}")
    info = "".join(f", {name} {value:g}" for name, value in played.info.items())
    lines.append(f"end: {played.status}, {played.finish_reason}, {played.sampled_turns} turns{info}")
    return lines

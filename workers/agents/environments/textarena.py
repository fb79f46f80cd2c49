"""Games of TextArena, usually in a virtual environment (`troupe env install textarena`)."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row, with_text

NEEDS = "the environment textarena needs the package textarena: troupe env install textarena, or name its `python`"


class TextArena(Environment):
    """A game: a turn is a move. The rewards are the game's, at its end. Several players are named 0, 1, ..."""

    def __init__(self, game: str, args: Mapping[str, Any] | None = None, players: int = 1) -> None:
        """`game`: its id, such as `Wordle-v0`; `args`: further arguments of `textarena.make`; `players`: how many."""
        try:
            make = importlib.import_module("textarena").make
        except ImportError as error:
            raise ValueError(f"{NEEDS} ({error})") from error
        try:
            self._game: Any = make(env_id=game, **(args or {}))
            self._game.reset(num_players=players)
        except Exception as error:  # a game refuses another number of players than it is for
            raise ValueError(f"{game}: {type(error).__name__}: {error}") from error
        self._name, self._players = game, players
        self._seen: dict[int, str] = {}
        self._system: list[Message] = []

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of seeds, without end."""
        return ({"prompt": f"Play {self._name}.", "seed": seed} for seed in itertools.count())

    def start(self, row: Row) -> Observation:
        """The rules and the board; the seed is the row's column `seed`, or the episode's."""
        self._game.reset(num_players=self._players, seed=int(row.metadata.get("seed", row.seed)) % 2**32)
        self._seen, self._system = {}, [message for message in row.messages if message["role"] == "system"]
        return self._shown()

    def step(self, message: Message) -> Observation:
        """The game's answer to a move."""
        done, _ = self._game.step(action=message["content"])
        if not done:
            return self._shown()
        rewards, info = self._game.close()
        invalid = {"invalid_move": float(any(one["invalid_move"] for one in info.values()))}
        found = {n: with_text(float(won), str(info[n].get("reason") or "")) for n, won in rewards.items()}
        if self._players == 1:
            return Observation(reward=found[0], done=True, info=invalid)
        return Observation(rewards={str(player): own for player, own in found.items()}, done=True, info=invalid)

    def _shown(self) -> Observation:
        """What is new to the player whose turn it is: wrappers of most games repeat the game so far."""
        player, observed = self._game.get_observation()
        text = observed if isinstance(observed, str) else "\n".join(text for _, text, _ in observed)
        seen, self._seen[player] = self._seen.get(player), text
        new = {"role": "user", "content": text.removeprefix(seen).strip() if seen else text}
        messages = [*self._system, new] if seen is None else [new]
        return Observation(messages, player=None if self._players == 1 else str(player))

"""Games of TextArena, usually in a virtual environment (`troupe env install textarena`)."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row

NEEDS = "the environment textarena needs the package textarena: troupe env install textarena, or name its `python`"


class TextArena(Environment):
    """A game of one player: a turn of the policy is a move. The reward is the game's, at its end."""

    def __init__(self, game: str, args: Mapping[str, Any] | None = None) -> None:
        """`game`: its id, such as `Wordle-v0`; `args`: further arguments of `textarena.make`."""
        try:
            make = importlib.import_module("textarena").make
        except ImportError as error:
            raise ValueError(f"{NEEDS} ({error})") from error
        try:
            self._game: Any = make(env_id=game, **(args or {}))
            self._game.reset(num_players=1)
        except Exception as error:  # games of several players refuse one
            raise ValueError(f"{game}: {type(error).__name__}: {error}") from error
        self._name, self._seen = game, ""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of seeds, without end."""
        return ({"prompt": f"Play {self._name}.", "seed": seed} for seed in itertools.count())

    def start(self, row: Row) -> Observation:
        """The rules and the board; the seed is the row's column `seed`, or the episode's."""
        self._game.reset(num_players=1, seed=int(row.metadata.get("seed", row.seed)) % 2**32)
        self._seen = ""
        system = [message for message in row.messages if message["role"] == "system"]
        return Observation([*system, self._shown()])

    def step(self, message: Message) -> Observation:
        """The game's answer to a move."""
        done, _ = self._game.step(action=message["content"])
        if not done:
            return Observation([self._shown()])
        rewards, info = self._game.close()
        return Observation(reward=float(rewards[0]), done=True, info={"invalid_move": float(info[0]["invalid_move"])})

    def _shown(self) -> Message:
        """What is new: wrappers of most games repeat the game so far."""
        seen, (_, observed) = self._seen, self._game.get_observation()
        self._seen = observed if isinstance(observed, str) else "\n".join(text for _, text, _ in observed)
        return {"role": "user", "content": self._seen.removeprefix(seen).strip() if seen else self._seen}

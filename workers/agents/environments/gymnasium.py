"""Environments of Gymnasium, usually in a virtual environment (`troupe env install gymnasium`)."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from troupe.workers.agents.environments.base import Environment, add_to_user
from troupe.workers.contract.environments import Message, Observation, Row

NEEDS = "the environment gymnasium needs the package gymnasium: troupe env install gymnasium, or name its `python`"
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m")
"""Text that a terminal would show in a colour, as renderers mark where the player is."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Gymnasium(Environment):
    """A turn of the policy is an action, and the observation behind it a user message.

    The action is the last number of the turn (`Discrete`), its last numbers (`MultiDiscrete`, `MultiBinary`, `Box`), or
    the turn itself (`Text`). A turn without one, or with one outside the space, is answered with the space and is no
    step. With `actions` it is the last of these words in the turn.
    """

    def __init__(
        self, id: str, args: Mapping[str, Any] | None = None, actions: list[str] | None = None, instructions: str = ""
    ) -> None:
        """Create the environment.

        Args:
            id: Its id, as of `gymnasium.make`; `module:id` imports a module that registers it.
            args: Further arguments of `gymnasium.make`. `render_mode: ansi` shows the text that it renders, coloured
                parts in brackets.
            actions: Words for the actions 0, 1, 2 ... of a `Discrete` space.
            instructions: Text before the first observation.
        """
        try:
            make = importlib.import_module("gymnasium").make
        except ImportError as error:
            raise ValueError(f"{NEEDS} ({error})") from error
        try:
            self._env: Any = make(id, **(args or {}))
        except Exception as error:  # the environment is the user's
            raise ValueError(f"{id}: {type(error).__name__}: {error}") from error
        self._space = self._env.action_space
        self._kind = type(self._space).__name__
        if self._kind not in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text"):
            raise ValueError(f"{id}: actions of the space {self._kind} are not supported")
        if actions is not None and (self._kind != "Discrete" or len(actions) != self._space.n):
            raise ValueError(f"actions: expected a word for each action of {self._space}, got {len(actions)}")
        self._words = [word.lower() for word in actions or ()]
        self._instructions = instructions

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of seeds, without end."""
        return ({"prompt": self._instructions or "Play.", "seed": seed} for seed in itertools.count())

    def start(self, row: Row) -> Observation:
        """The prompt and the first observation; the seed is the row's column `seed`, or the episode's."""
        seed = int(row.metadata.get("seed", row.seed)) % 2**32
        observation, _ = self._env.reset(seed=seed)
        self._space.seed(seed)
        return Observation(add_to_user(row.messages, self._text(observation)))

    def step(self, message: Message) -> Observation:
        try:
            action = self._action(message["content"])
        except ValueError as error:
            return Observation([{"role": "user", "content": f"error: {error}"}])
        observation, reward, terminated, truncated, _ = self._env.step(action)
        answer = [{"role": "user", "content": self._text(observation)}]
        ends = {"terminated": float(terminated), "truncated": float(truncated)} if terminated or truncated else {}
        return Observation(answer, reward=float(reward), done=bool(terminated or truncated), info=ends)

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        shown = self._env.render() if self._env.render_mode == "ansi" else observation
        return _COLOURED.sub(r"[\1]", shown) if isinstance(shown, str) else json.dumps(shown, default=_plain)

    def _action(self, text: str) -> Any:
        """The action that a turn is. Raises ValueError if it is none."""
        if self._words:
            found = re.findall("|".join(rf"\b{re.escape(word)}\b" for word in self._words), text.lower())
            if not found:
                raise ValueError(f"no action; name one of {', '.join(self._words)}")
            return int(self._space.start) + self._words.index(found[-1])
        if self._kind == "Text":
            action: Any = text.strip()
        elif self._kind == "Discrete":
            numbers = _NUMBER.findall(text)
            action = int(float(numbers[-1])) if numbers else None
        else:
            array = importlib.import_module("numpy").array
            size = int(self._space.sample().size)
            numbers = [float(one) for one in _NUMBER.findall(text)[-size:]]
            action = array(numbers, self._space.dtype).reshape(self._space.shape) if len(numbers) == size else None
        if action is None or not self._space.contains(action):
            raise ValueError(f"no action of {self._space}")
        return action


def _plain(value: Any) -> Any:
    """A numpy array or number within an observation, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)

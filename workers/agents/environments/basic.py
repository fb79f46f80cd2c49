"""Built-in environments without tools: a single turn, a number to guess, a task with further tries."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Mapping
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row, parted, with_text
from troupe.workers.contract.rewards import Feedback, is_solved
from troupe.workers.rewards.loading import load
from troupe.workers.rewards.results import parse_value

_INTEGER = re.compile(r"-?\d+")


class RewardFunction:
    """A reward function, as in `roles.reward`, for the text of one turn."""

    def __init__(self, function: str, args: Mapping[str, Any] | None) -> None:
        """Load it. Raises ValueError."""
        self._args = dict(args or {})
        self._function = load(function, self._args)

    async def value(self, text: str, row: Row) -> float | Feedback:
        """The value of a text, with what the function says of it. Raises ValueError if the function returns no number,
        and whatever it raises."""
        returned = self._function(text, row.answer, dict(row.metadata), **self._args)
        reply = parse_value(await returned if inspect.isawaitable(returned) else returned, text)
        if "failure" in reply:
            raise ValueError(reply["failure"])
        return with_text(float(reply["value"]), str(reply.get("feedback", "")))


class SingleTurn(Environment):
    """Shows the prompt and ends after the first turn. Rewards come from `roles.reward`."""

    def start(self, row: Row) -> Observation:
        return Observation(row.messages)

    def step(self, message: Message) -> Observation:
        """The end."""
        return Observation(done=True)


class GuessNumber(Environment):
    """Thinks of a number; says `higher` or `lower` to every guess.

    The reward is 1 for the number itself, less `cost` for every wrong guess before it, but never less than 0. The
    episode ends with reward 0 when the guesses are used up. A turn without an integer counts as a wrong guess.
    """

    def __init__(self, low: int = 1, high: int = 10, guesses: int = 4, cost: float = 0.1) -> None:
        """`low`, `high`: range of the number, both included; `guesses`: at most so many."""
        if low > high:
            raise ValueError(f"low must not be above high, got {low} and {high}")
        if guesses < 1:
            raise ValueError(f"guesses must be at least 1, got {guesses}")
        self._low, self._high, self._left, self._cost = low, high, guesses, cost
        self._wrong = 0
        self._number = low

    def start(self, row: Row) -> Observation:
        """The rules, after the system message of the row, if it has one."""
        self._number = random.Random(row.seed).randint(self._low, self._high)
        rules = (
            f"I think of a whole number from {self._low} to {self._high}. Guess it: answer with one number only. "
            f"You have {self._left} guesses."
        )
        system = [message for message in row.messages if message["role"] == "system"]
        return Observation([*system, {"role": "user", "content": rules}])

    def step(self, message: Message) -> Observation:
        """Right, or in which direction the number is."""
        found = _INTEGER.findall(message["content"])
        guess = int(found[-1][:20]) if found else None
        if guess == self._number:
            return Observation(reward=max(0.0, 1.0 - self._cost * self._wrong), done=True, info={"solved": 1.0})
        self._wrong += 1
        self._left -= 1
        if not self._left:
            return Observation(reward=0.0, done=True, info={"solved": 0.0})
        hint = "Answer with one number." if guess is None else ("higher" if guess < self._number else "lower")
        return Observation([{"role": "user", "content": hint}])


class Retry(Environment):
    """Scores every answer with a reward function; a wrong one is answered with `feedback`.

    The reward is the function's value for the last answer, times `discount` for every answer before it. An answer is
    right from a value of `solved_at` on.
    """

    def __init__(
        self,
        function: str = "last_number",
        args: Mapping[str, Any] | None = None,
        attempts: int = 2,
        discount: float = 0.5,
        solved_at: float = 1.0,
        feedback: str = "That is not right. Try again.",
    ) -> None:
        """`function`, `args`: a reward function, as in `roles.reward`; `attempts`: answers in all, at least 1."""
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {attempts}")
        self._reward = RewardFunction(function, args)
        self._left, self._discount, self._solved_at, self._feedback = attempts, discount, solved_at, feedback
        self._scale = 1.0
        self._row = Row(())

    def start(self, row: Row) -> Observation:
        self._row = row
        return Observation(row.messages)

    async def step(self, message: Message) -> Observation:
        """The reward of a right or of the last answer, or the feedback."""
        value, said = parted(await self._reward.value(message["content"], self._row))
        self._left -= 1
        solved = is_solved(value, self._solved_at)
        if solved or not self._left:
            reward = with_text(self._scale * value, said)
            return Observation(reward=reward, done=True, info={"solved": float(solved)})
        self._scale *= self._discount
        return Observation([{"role": "user", "content": self._feedback}])

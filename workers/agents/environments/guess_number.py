"""A number to be guessed, with a hint after every wrong guess."""

from __future__ import annotations

import random
import re

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row

_INTEGER = re.compile(r"-?\d+")


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

"""A task whose wrong answers get another try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.environments.reward_environment import RewardFunction
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.contract.rewards import is_solved


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
        """The prompt."""
        self._row = row
        return Observation(row.messages)

    async def step(self, message: Message) -> Observation:
        """The reward of a right or of the last answer, or the feedback."""
        value = await self._reward.value(message["content"], self._row)
        self._left -= 1
        solved = is_solved(value, self._solved_at)
        if solved or not self._left:
            return Observation(reward=self._scale * value, done=True, info={"solved": float(solved)})
        self._scale *= self._discount
        return Observation([{"role": "user", "content": self._feedback}])

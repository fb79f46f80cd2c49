"""The frozen model that plays against the policy: the judges of the run, asked as a player of a game."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import JudgeAnswer, JudgeGone, JudgeLink, Question
from troupe.workers.data.chat import turn_seed

_PAUSE_S = 1.0


@dataclass(frozen=True)
class Opponent:
    """Plays in one episode."""

    judge: Callable[[], JudgeLink | None]
    """The current link: judges come and go."""
    seed: int
    """Seed of the group."""
    index: int
    """Sample of the group."""
    timeout_s: float
    """Longest turn."""

    async def __call__(self, messages: list[Message], number: int) -> JudgeAnswer:
        """Turn `number` of an episode, by what its player has seen. Waits for a judge until the episode ends."""
        question = Question(messages, turn_seed(self.seed, self.index, number))
        while True:
            judge = self.judge()
            if judge is not None:
                with contextlib.suppress(JudgeGone):
                    return await judge.turn(question, self.timeout_s)
            await asyncio.sleep(_PAUSE_S)

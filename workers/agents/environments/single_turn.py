"""The plain task as an environment: one prompt, one response."""

from __future__ import annotations

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row


class SingleTurn(Environment):
    """Shows the prompt and ends after the first turn. Rewards come from `roles.reward`."""

    def start(self, row: Row) -> Observation:
        """The prompt."""
        return Observation(row.messages)

    def step(self, message: Message) -> Observation:
        """The end."""
        return Observation(done=True)

"""The class that an environment implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable

from troupe.workers.contract.environments import Message, Observation, Row


class Environment(ABC):
    """One episode. Every sample has a separate instance, in a process that no other episode uses at the same time.

    All methods may be coroutines. What `start` and `step` raise fails the episode's sample; it never becomes a reward.
    """

    @abstractmethod
    def start(self, row: Row) -> Observation | Awaitable[Observation]:
        """The beginning of the conversation, usually `Observation(row.messages)`, and the tools that it offers."""

    @abstractmethod
    def step(self, message: Message) -> Observation | Awaitable[Observation]:
        """The answer to one turn of the policy.

        Args:
            message: The turn: `role` is `assistant`, `content` its text and `tool_calls`, if a parser is configured,
                the calls in it, each `{"id", "type": "function", "function": {"name", "arguments"}}`;
                `finish_reason` is `stop` or `length`, and `usage` has `prompt_tokens` and `completion_tokens`;
                `logprobs`, if the observation asked for them, has the text and the log-prob of every token.
                If tools are offered, a turn whose calls are not run has `unread_call`: `cut` if the turn was cut
                at its token limit, with or without a call, `malformed` if the parser cannot read the call.
        """

    def close(self) -> Awaitable[None] | None:  # noqa: B027  most environments hold nothing
        """Free what the episode holds. Called once at the end of every episode, unless its process was killed."""

"""The class that an environment implements, and the loading of one by name."""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.contract.environments import ENVIRONMENTS, Message, Observation, Row
from troupe.workers.contract.imports import NameProblem, import_attribute, locate

_HOMES = {name: f"troupe.workers.agents.environments.{one.home}" for name, one in ENVIRONMENTS.items()}
METHODS = ("start", "step", "close")


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


def add_to_user(messages: Sequence[Message], text: str) -> list[Message]:
    """The text as the user's message, within the last one if that is the user's: templates refuse two in a row."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


class EnvironmentLoadError(ValueError):
    """An environment cannot be used: unknown, not importable, not an environment, or not with these arguments."""


class EnvironmentArgumentsError(EnvironmentLoadError):
    """An environment does not take its arguments."""


def load(name: str, args: Mapping[str, Any]) -> Callable[[], Environment]:
    """Import an environment and check that it can be created with its arguments; returns what creates one for an
    episode. `name` is a built-in one or `package.module:Class`, of a class with the methods `start`, `step` and
    `close`. Raises EnvironmentLoadError if the import fails, or there is no such class, or it is not an environment,
    and EnvironmentArgumentsError if it does not take the arguments, or refuses them with a ValueError or TypeError."""
    try:
        place = locate(name, _HOMES, "environment", "package.module:Class")
        found = import_attribute(name, *place)
    except NameProblem as error:
        raise EnvironmentLoadError(str(error)) from error
    if not inspect.isclass(found):
        raise EnvironmentLoadError(f"{name}: not a class, got {type(found).__name__}")
    if missing := [method for method in METHODS if not callable(inspect.getattr_static(found, method, None))]:
        raise EnvironmentLoadError(f"{name}: has no method {', '.join(missing)}")
    try:
        found(**args)
    except (TypeError, ValueError) as error:
        raise EnvironmentArgumentsError(f"{name}: {error}") from error
    kind: Any = found
    return lambda: kind(**args)


def find_problem(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield once what is wrong with an environment (`name`, `args`): the field and a message, both empty without a
    problem."""
    try:
        load(environment["name"], environment["args"])
    except EnvironmentArgumentsError as error:
        yield "args", str(error)
    except EnvironmentLoadError as error:
        yield "name", str(error)
    else:
        yield "", ""


def rows(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of data that an environment has itself, at most `limit`; the request has also `name` and `args`. Raises
    ValueError if it cannot be used, or has none."""
    try:
        environment: Any = load(request["name"], request["args"])()
    except EnvironmentLoadError as error:
        raise ValueError(str(error)) from error
    if not callable(inspect.getattr_static(environment, "rows", None)):
        raise ValueError(f"{request['name']}: it has no tasks itself (method `rows`)")
    yield from itertools.islice(environment.rows(), request["limit"])

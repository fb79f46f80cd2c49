"""What a protocol of the gateway is: how its requests, responses, streams and errors look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from troupe.workers.contract.environments import Message

Body = dict[str, Any]
"""A JSON object of a request or a response."""
Event = tuple[str, Any]
"""Name and data of an event of a stream; without a name, or with data that is text, as they are."""

DISTRIBUTION = "it would change the distribution that is trained"
SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Options of the distribution, which the spec sets (`sampling`)."""
PENALTIES = dict.fromkeys(
    ("min_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"), DISTRIBUTION
)
ACCOUNTS = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "cache_control"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
"""Fields about who asks, and about caches and bills."""


class Refused(ValueError):
    """A request that gets an error with a code of its service."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Fields:
    """What a protocol does with the fields of a request.

    A field that would change a response is honoured or refused: an agent would be trained on responses that it did not
    ask for. Exceptions are fields that clients always send, and fields that no service knows: a run logs them once.
    """

    done: frozenset[str]
    refused: Mapping[str, str]
    """Why each of them is refused."""
    ignored: frozenset[str] = SAMPLING | ACCOUNTS
    """Without effect on a response, or the spec's."""
    hints: frozenset[str] = frozenset()
    """They ask for a manner that the policy is not told; a run logs them once, as it does unknown ones."""
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """Values of refused fields that ask for nothing, besides empty ones."""

    def check(self, body: Mapping[str, Any]) -> list[str]:
        """The fields of a request that are ignored though they could change a response. Raises ValueError."""
        noted = []
        for name, value in body.items():
            if name in self.done or name in self.ignored or not value or value == self.neutral.get(name):
                continue
            if name in self.refused:
                raise ValueError(f"{name:.60}: {self.refused[name]}; leave it out")
            noted.append(f"{name:.60}")
        return noted


class Protocol:
    """A protocol. An instance serves one episode, and may remember its responses."""

    path: ClassVar[str]
    fields: ClassVar[Fields]

    def request(self, body: Body, noted: list[str]) -> Body:
        """The request by the names of `ChatRequest`; adds what is left out of it to `noted`. Raises ValueError."""
        raise NotImplementedError

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        """The response to a request: the turns of the policy, one for each choice."""
        raise NotImplementedError

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        raise NotImplementedError

    def error(self, status: int, message: str, code: str | None = None) -> Body:
        """The body of an error; the form of OpenAI's services."""
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def usage_of(turns: Sequence[Message]) -> tuple[int, int]:
    """Tokens of a request: its prompt once, and all responses."""
    counts = [turn["usage"] for turn in turns if "usage" in turn]
    prompt = max((count["prompt_tokens"] for count in counts), default=0)
    return prompt, sum(count["completion_tokens"] for count in counts)


def openai_usage(turns: Sequence[Message]) -> Body:
    """The same in the form of OpenAI's completions."""
    prompt, sampled = usage_of(turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def section(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in a field; empty if there is none. Raises ValueError."""
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected an object, got {type(value).__name__}")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[Body]:
    """The objects in a field; none if it has none. Raises ValueError."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: expected a list of objects")
    return value


def text_of(content: Any, place: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content: text, or blocks of a kind that has one. Raises ValueError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(f"{place}: expected text or a list of blocks, got {type(content).__name__}")
    for block in content:
        if block.get("type") not in kinds:
            raise ValueError(f"{place}: blocks of type {block.get('type')!r:.40} are not supported, only {kinds[0]}")
        if not isinstance(block.get("text"), str):
            raise ValueError(f"{place}: expected text in each block")
    return "".join(block["text"] for block in content)


def function_tool(name: Any, description: Any, parameters: Any) -> Body:
    """A tool in the form of chat completions."""
    described = {"description": description} if description is not None else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}


def function_call(call_id: Any, name: Any, arguments: str) -> Body:
    """A call in the form of chat completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

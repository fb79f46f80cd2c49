"""Protocols of prompts without the chat template: OpenAI's completions, and vLLM's of token ids in and out.

Agents that render prompts themselves use the latter (`/inference/v1/generate`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from troupe.workers.agents.environments.gateway.chat import chunks
from troupe.workers.agents.environments.gateway.protocol import (
    ACCOUNTS,
    PENALTIES,
    SAMPLING,
    Body,
    Event,
    Fields,
    Protocol,
    openai_usage,
    section,
)
from troupe.workers.agents.environments.gateway.request import MODEL_NAME
from troupe.workers.contract.environments import Message


class Completions(Protocol):
    """POST /v1/completions."""

    path = "/v1/completions"
    fields = Fields(
        done=frozenset({"prompt", "max_tokens", "n", "stop", "logprobs", "stream", "stream_options"}),
        refused={
            **PENALTIES,
            "best_of": "every sampled response is trained: use n, and choose in the agent",
            "echo": "the agent has the prompt",
            "suffix": "the policy continues a prompt, and fills no gap",
        },
        ignored=SAMPLING | ACCOUNTS,
        neutral={"best_of": 1, "repetition_penalty": 1},
    )

    def request(self, body: Body, noted: list[str]) -> Body:
        """The request with the prompt as a message."""
        logprobs = body.get("logprobs")
        if logprobs is not None and (isinstance(logprobs, bool) or logprobs != 0):
            raise ValueError("logprobs: only the log-prob of the sampled token is known: use 0")
        names = ("n", "stop", "max_tokens", "stream", "stream_options")
        own = {name: body.get(name) for name in names}
        return own | {"messages": [raw_prompt(body, "prompt")], "logprobs": logprobs is not None, "raw": True}

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        """A completion with a choice for each turn."""
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": [
                {
                    "index": number,
                    "text": turn["content"],
                    "finish_reason": turn.get("finish_reason", "stop"),
                    "logprobs": _logprobs(turn),
                }
                for number, turn in enumerate(turns)
            ],
            "usage": openai_usage(turns),
        }

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        """Each choice in one piece, and once the usage if it is asked for."""
        yield from chunks(body, dict(response), response["choices"])


def raw_prompt(body: Body, name: str) -> Message:
    """The prompt in a field: text, or token ids. Raises ValueError."""
    prompt: Any = body.get(name)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return {"role": "user", "content": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return {"role": "user", "content": "", "token_ids": prompt}
    raise ValueError(f"{name}: expected one prompt, of text or of token ids")


def _logprobs(turn: Message) -> Body | None:
    if turn.get("logprobs") is None:
        return None
    texts = [text for text, _ in turn["logprobs"]]
    values = [value for _, value in turn["logprobs"]]
    places = list(accumulate(map(len, texts), initial=0))[:-1]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": places}


_DEFAULTS = frozenset(
    {"output_kind", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output"}
)
_PARAMETERS = Fields(
    done=frozenset({"max_tokens", "n", "stop", "logprobs"}),
    refused={**PENALTIES, "prompt_logprobs": "the prompt's tokens are not sampled"},
    ignored=SAMPLING | _DEFAULTS,
    hints=frozenset({"stop_token_ids", "ignore_eos"}),
    neutral={"repetition_penalty": 1},
)
"""Of `sampling_params`."""


class Generate(Protocol):
    """POST /inference/v1/generate."""

    path = "/inference/v1/generate"
    fields = Fields(
        done=frozenset({"token_ids", "sampling_params", "request_id"}),
        refused={
            "stream": "a response comes in one piece",
            "features": "prompts are token ids",
            "content_parts": "prompts are token ids",
            "kv_transfer_params": "the engine's cache is its own",
        },
        ignored=ACCOUNTS | {"priority", "cache_salt", "return_token_ids", "output_mode", "stream_options"},
        hints=frozenset({"reasoning_ended", "reasoning_parser_kwargs"}),
    )

    def request(self, body: Body, noted: list[str]) -> Body:
        """The request with the token ids as a message."""
        own = section(body, "sampling_params")
        noted += [f"sampling_params.{name}" for name in _PARAMETERS.check(own)]
        logprobs = own.get("logprobs")
        if logprobs is not None and logprobs not in (0, 1):
            raise ValueError("sampling_params.logprobs: only the log-prob of the sampled token is known: use 1")
        wanted = {name: own.get(name) for name in ("max_tokens", "n", "stop")}
        return wanted | {"messages": [raw_prompt(body, "token_ids")], "logprobs": logprobs is not None, "raw": True}

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        """The sampled token ids of each choice."""
        return {
            "request_id": body.get("request_id") or secrets.token_hex(16),
            "output_mode": "tokens",
            "choices": [
                {
                    "index": number,
                    "token_ids": turn["token_ids"],
                    "finish_reason": turn.get("finish_reason", "stop"),
                    "stop_reason": turn.get("stop_sequence"),
                    "logprobs": _token_logprobs(turn),
                }
                for number, turn in enumerate(turns)
            ],
            "usage": openai_usage(turns),
        }

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        """None: streams are refused."""
        yield from ()


def _token_logprobs(turn: Message) -> Body | None:
    if turn.get("logprobs") is None:
        return None
    found = zip(turn["token_ids"], turn["logprobs"], strict=True)
    return {"content": [{"token_id": token, "logprob": value, "top_logprobs": []} for token, (_, value) in found]}

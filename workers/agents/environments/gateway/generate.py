"""vLLM's protocol of token ids in and out (`/inference/v1/generate`), which agents use that render prompts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from troupe.workers.agents.environments.gateway.completions import raw_prompt
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
from troupe.workers.contract.environments import Message

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
                    "logprobs": _logprobs(turn),
                }
                for number, turn in enumerate(turns)
            ],
            "usage": openai_usage(turns),
        }

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        """None: streams are refused."""
        yield from ()


def _logprobs(turn: Message) -> Body | None:
    if turn.get("logprobs") is None:
        return None
    found = zip(turn["token_ids"], turn["logprobs"], strict=True)
    return {"content": [{"token_id": token, "logprob": value, "top_logprobs": []} for token, (_, value) in found]}

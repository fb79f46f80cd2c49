"""The protocol of OpenAI's chat completions. The gateway's own requests have its names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.agents.environments.gateway.protocol import (
    ACCOUNTS,
    PENALTIES,
    SAMPLING,
    Body,
    Event,
    Fields,
    Protocol,
    openai_usage,
)
from troupe.workers.agents.environments.gateway.request import MODEL_NAME
from troupe.workers.contract.environments import Message

_NOT_TOLD = ("finish_reason", "usage", "unread_call", "logprobs", "stop_sequence", "behind_stop", "token_ids")
"""Fields of a turn that do not belong to the message of a response."""
_FORM = "use response_format, or sampling.structured in the spec"
_FUNCTIONS = "use tools and tool_choice, which have replaced it"
_AUDIO = "the policy writes text"
_ENGINE = "it is not the engine's own server"
_REFUSED = {
    **PENALTIES,
    "top_logprobs": "only the log-prob of the sampled token is known: use logprobs",
    "return_token_ids": "the tokens are recorded in the run's trajectories",
    "best_of": "every sampled response is trained: use n, and choose in the agent",
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _FORM),
    "chat_template": "the template is the spec's: model.chat_template",
    "chat_template_kwargs": "the template is the spec's: model.chat_template",
    "modalities": _AUDIO,
    "audio": _AUDIO,
    "web_search_options": "the policy has the tools of the request alone",
    "stop_token_ids": _ENGINE,
    "ignore_eos": _ENGINE,
    "prompt_logprobs": _ENGINE,
}


class Chat(Protocol):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    fields = Fields(
        done=frozenset(
            {"messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_tokens", "stop", "n"}
            | {"max_completion_tokens", "logprobs", "stream", "stream_options"}
        ),
        refused=_REFUSED,
        ignored=SAMPLING | ACCOUNTS | {"prediction"},
        hints=frozenset({"reasoning_effort", "reasoning", "verbosity"}),
        neutral={"best_of": 1, "repetition_penalty": 1, "function_call": "none", "modalities": ["text"]},
    )

    def request(self, body: Body, noted: list[str]) -> Body:
        """The fields that are honoured."""
        return {name: value for name, value in body.items() if name in self.fields.done}

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        """A completion with a choice for each turn."""
        choices = [
            {
                "index": number,
                "message": {**_told(turn), "content": turn["content"] or None},
                "finish_reason": "tool_calls" if turn.get("tool_calls") else turn.get("finish_reason", "stop"),
                "logprobs": logprobs_of(turn),
            }
            for number, turn in enumerate(turns)
        ]
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": choices,
            "usage": openai_usage(turns),
        }

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        """The whole messages, their ends, and once the usage if it is asked for."""
        parts = []
        for choice in response["choices"]:
            message = choice["message"]
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())]
            delta = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
            own = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
            parts += [own, own | {"delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}]
        yield from chunks(body, {**response, "object": "chat.completion.chunk"}, parts)


def chunks(body: Body, response: Body, parts: Sequence[Body]) -> Iterator[Event]:
    """The chunks of a stream of completions, each with a part of a choice, and the usage."""
    usage = response.pop("usage")
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    for part in parts:
        yield "", {**response, "choices": [part], **({"usage": None} if with_usage else {})}
    if with_usage:
        yield "", {**response, "choices": [], "usage": usage}
    yield "", "[DONE]"


def _told(turn: Message) -> Message:
    """The fields of a turn that belong to the message."""
    return {name: value for name, value in turn.items() if name not in _NOT_TOLD}


def logprobs_of(turn: Mapping[str, Any]) -> Body | None:
    """The log-probs of a choice, or None if not requested."""
    if turn.get("logprobs") is None:
        return None
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, value in turn["logprobs"]
    ]
    return {"content": content, "refusal": None}

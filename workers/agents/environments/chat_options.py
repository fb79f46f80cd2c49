"""Options of the chat-completions protocol: the ones that the endpoint honours, and the reasons against others.

An option that would change a response is honoured or refused, not ignored: an agent would be trained on responses that
it did not ask for. The exceptions are the temperature and its kin, which clients always send: the spec decides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HONOURED = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "stream"),
}
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "stream_options"),
    *("prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
}
"""Options that a response does not depend on, and options of the distribution, which the spec sets (`sampling`)."""
_DISTRIBUTION = "it would change the distribution that is trained"
_FORM = "use response_format, or sampling.structured in the spec"
_FUNCTIONS = "use tools and tool_choice, which have replaced it"
_REFUSED = {
    "top_logprobs": "only the log-prob of the sampled token is known",
    "logit_bias": _DISTRIBUTION,
    "presence_penalty": _DISTRIBUTION,
    "frequency_penalty": _DISTRIBUTION,
    "repetition_penalty": _DISTRIBUTION,
    "best_of": "every sampled response is trained: use n, and choose in the agent",
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "guided_json": _FORM,
    "guided_regex": _FORM,
    "guided_choice": _FORM,
    "guided_grammar": _FORM,
    "structured_outputs": _FORM,
    "chat_template": "the template is the spec's: model.chat_template",
}
_NEUTRAL = {"best_of": 1, "repetition_penalty": 1, "function_call": "none", "modalities": ["text"]}
"""Values that ask for nothing, besides empty ones."""


def check_options(body: Mapping[str, Any]) -> None:
    """Refuse a request with an option that the endpoint does not honour. Raises ValueError."""
    for name, value in body.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or not value or value == _NEUTRAL.get(name):
            continue
        raise ValueError(f"{name:.60}: {_REFUSED.get(name, 'the endpoint has no such option')}")
    for name in ("parallel_tool_calls", "logprobs", "stream"):
        if not isinstance(body.get(name), bool | None):
            raise ValueError(f"{name}: expected true or false, got {body[name]!r:.40}")

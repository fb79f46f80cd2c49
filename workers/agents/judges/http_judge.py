"""A judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

from troupe.workers.agents.judges.rubric import HttpJudgeConfig, JudgeError
from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import JudgeAnswer, whole_words
from troupe.workers.contract.text import one_line, valid_text

_SHOWN = 500
"""Bytes of a body in a failure."""


class HttpJudge:
    """Asks an endpoint. A request that cannot be answered is a failure of its sample alone."""

    def __init__(self, config: HttpJudgeConfig) -> None:
        """Raises JudgeError if the key's variable is not set."""
        self._config = config
        self.name = f"{config.url} {config.model} {config.temperature} {config.max_tokens}"
        self._key = os.environ.get(config.api_key_variable, "") if config.api_key_variable else "none"
        if not self._key:
            raise JudgeError(f"the environment variable {config.api_key_variable} is not set")

    def ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question."""
        return asyncio.run(self._ask(questions, timeout_s))

    async def _ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        from openai import AsyncOpenAI, OpenAIError

        config = self._config
        places = asyncio.Semaphore(config.concurrency)
        options: dict[str, Any] = {} if config.temperature is None else {"temperature": config.temperature}
        client: Any = AsyncOpenAI(base_url=config.url, api_key=self._key, max_retries=config.retries, timeout=timeout_s)

        async def one(question: list[Message]) -> JudgeAnswer:
            try:
                async with asyncio.timeout(timeout_s), places:
                    # What the endpoint sent, unread: the client accepts whatever is JSON, and text that is not.
                    response = await client.chat.completions.with_raw_response.create(
                        model=config.model, messages=question, max_tokens=config.max_tokens, **options
                    )
            except TimeoutError:
                return JudgeAnswer(failure=f"timeout after {timeout_s:g} s")
            except (OpenAIError, UnicodeError) as error:  # half a character cannot be sent
                return JudgeAnswer(failure=one_line(f"{type(error).__name__}: {error}"))
            return read_completion(response.content)

        async with client:
            return list(await asyncio.gather(*map(one, questions)))


def read_completion(body: bytes) -> JudgeAnswer:
    """The text of the first choice in the body of a response, or what the body is instead.

    Of an answer that was cut at `max_tokens`, the last word is left out.
    """
    said = body[:_SHOWN].decode("utf-8", "replace")
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        return JudgeAnswer(failure="the endpoint's answer is not JSON", said=said)
    match completion:
        case {"choices": [{"message": {"content": str() as text}}, *_]}:
            pass
        case {"choices": [{"message": {"content": list() as parts}}, *_]}:
            text = "".join(_text_of(part) for part in parts)
        case {"choices": []} | {"choices": [{"message": {"content": None}}, *_]}:
            text = ""
        case _:
            return JudgeAnswer(failure="the endpoint's answer is not a chat completion", said=said)
    match completion:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            text = whole_words(text)
    if valid_text(text) != text:
        return JudgeAnswer(failure="an answer that is not valid text", said=text)
    return JudgeAnswer(text) if text.strip() else JudgeAnswer(failure="an empty answer", said=said)


def _text_of(part: Any) -> str:
    """The text of a part of a message; empty for a part of another type."""
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            return ""

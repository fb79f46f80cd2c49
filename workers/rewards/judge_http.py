"""A judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import JudgeAnswer
from troupe.workers.rewards.judge_rubric import HttpJudgeConfig, JudgeError


class HttpJudge:
    """Asks an endpoint. A request that cannot be answered is a failure of its sample alone."""

    def __init__(self, config: HttpJudgeConfig) -> None:
        """Raises JudgeError where the key's variable is not set."""
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
                    completion = await client.chat.completions.create(
                        model=config.model, messages=question, max_tokens=config.max_tokens, **options
                    )
            except TimeoutError:
                return JudgeAnswer(failure=f"timeout after {timeout_s:g} s")
            except OpenAIError as error:
                return JudgeAnswer(failure=f"{type(error).__name__}: {error}")
            text = completion.choices[0].message.content if completion.choices else None
            return JudgeAnswer(text) if text else JudgeAnswer(failure="an empty answer")

        async with client:
            return list(await asyncio.gather(*map(one, questions)))

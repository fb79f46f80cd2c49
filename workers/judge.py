"""The judge worker: one vLLM engine with a frozen model that answers questions about responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from troupe.workers.contract.config import JudgeConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import MIN_TEMPERATURE, VerifiedModel
from troupe.workers.contract.judges import JudgeAnswer, Question, whole_words
from troupe.workers.contract.messages import GroupRequest, WorkerGone, WorkerHealth
from troupe.workers.data.chat import PromptRefused
from troupe.workers.data.plain_text import response_text
from troupe.workers.data.turn_ends import without_end
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.engine.rows import answer_tokens, flat_logprobs
from troupe.workers.rewards.answer_text import visible
from troupe.workers.rewards.thoughts import template_opens_thought
from troupe.workers.rollout import RolloutWorker

_PLACES = 20
"""Tokens that could stand for each one of an answer: the most that an engine returns by default."""


class JudgeWorker:
    """Answers questions with the model of the role `judge`, which stays as it is."""

    def __init__(self, config: JudgeConfig, name: str) -> None:
        self._config = config
        sampling = SamplingConfig(
            temperature=config.temperature or MIN_TEMPERATURE,
            max_tokens=config.max_tokens,
            structured=config.structured,
        )
        rollout = RolloutConfig(
            model=config.model,
            engine=config.engine,
            engine_options=config.engine_options,
            sampling=sampling,
            seed=0,
            transfer_backend="shm",
            top_logprobs=_PLACES if config.expected else 0,
            device=config.device,
        )
        self._engine = RolloutWorker(rollout, name)
        self._opens_thought = False

    async def start(self) -> WorkerHealth:
        """Load the model. Raises what `RolloutWorker.start` raises, and WeightDigestMismatch if a process of the
        engine has loaded another model than the run has written."""
        health = await self._engine.start()
        if isinstance(self._config.model, VerifiedModel):
            await self._engine.weights.confirm_model(self._config.model.weights_digest)
        if self._config.structured is None:  # a form is sampled from the first token on
            self._opens_thought = await asyncio.to_thread(template_opens_thought, self._config.model)
        return health

    async def answer(self, questions: Sequence[Question]) -> list[JudgeAnswer]:
        """Answer questions; one that does not fit the model is a failure. Raises WorkerGone."""
        try:
            return list(await asyncio.gather(*map(self._answer, questions)))
        except EngineClosed as error:
            raise WorkerGone(str(error)) from error

    async def _answer(self, question: Question) -> JudgeAnswer:
        # The seed is the same for all questions: an answer depends on its question and number alone.
        request = GroupRequest("judge", 0, 0, 1, seed=question.number, greedy=self._config.temperature == 0)
        try:
            answer, tokenizer = await self._engine.generation.answer(request, json.dumps(question.messages))
        except PromptRefused as error:
            return JudgeAnswer(failure=f"question: {error}")
        text = response_text(tokenizer, without_end(tokenizer, answer.token_ids))
        read = _read(text, str(answer.finish_reason), self._opens_thought)
        return replace(read, tokens=answer_tokens(flat_logprobs(answer), tokenizer)) if self._config.expected else read

    async def health(self) -> WorkerHealth:
        return await self._engine.health()

    async def watch(self, seconds: float) -> bool:
        return await self._engine.engine.watch(seconds)

    async def close(self) -> None:
        await self._engine.close()


def _read(text: str, finish_reason: str, opens_thought: bool) -> JudgeAnswer:
    """An answer without its thought, and of one that was cut without its last word."""
    said = visible(text, opens_thought=opens_thought)
    if text.strip() and not said.strip():
        return JudgeAnswer(failure="an answer that is a thought only", said=text)
    said = whole_words(said) if finish_reason == "length" else said
    return JudgeAnswer(said) if said.strip() else JudgeAnswer(failure="an empty answer")

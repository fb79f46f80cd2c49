"""The judge worker: one vLLM engine with a frozen model that answers questions about responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pyarrow as pa

from troupe.workers.contract.config import MIN_TEMPERATURE, JudgeConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.judges import JudgeAnswer, Question, whole_words
from troupe.workers.contract.messages import PROMPTS, GroupRequest, WorkerGone, WorkerHealth
from troupe.workers.engine.errors import EngineClosed, EngineDead
from troupe.workers.rewards.answer_text import visible
from troupe.workers.rewards.thoughts import template_opens_thought
from troupe.workers.rollout import RolloutWorker

_WATCH_S = 1.0


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
            device=config.device,
        )
        self._engine = RolloutWorker(rollout, name)
        self._opens_thought = False

    async def start(self) -> WorkerHealth:
        """Load the model. Raises what `RolloutWorker.start` raises."""
        health = await self._engine.start()
        if self._config.structured is None:  # a form is sampled from the first token on
            self._opens_thought = await asyncio.to_thread(template_opens_thought, self._config.model)
        return health

    async def answer(self, questions: Sequence[Question]) -> list[JudgeAnswer]:
        """Answer questions; one that does not fit the model is a failure. Raises WorkerGone if the engine does not
        serve."""
        rows = [
            {"row": row, "messages": json.dumps(one.messages), "answer": "", "metadata": "{}", "origin": "question"}
            for row, one in enumerate(questions)
        ]
        table = pa.Table.from_pylist(rows, schema=PROMPTS)
        try:
            asked = (self._answer(row, one.number, table) for row, one in enumerate(questions))
            return list(await asyncio.gather(*asked))
        except EngineClosed as error:
            raise WorkerGone(str(error)) from error

    async def _answer(self, row: int, number: int, questions: pa.Table) -> JudgeAnswer:
        # The seed is the same for all questions: an answer depends on its question and number alone.
        request = GroupRequest("judge", row, 0, 1, seed=number, greedy=self._config.temperature == 0)
        summary, table = await self._engine.generate(request, questions)
        if summary.refused:
            return JudgeAnswer(failure=summary.refused)
        return _read(str(table["response"][0].as_py()), str(table["finish_reason"][0]), self._opens_thought)

    async def health(self) -> WorkerHealth:
        return await self._engine.health()

    async def watch(self, seconds: float) -> bool:
        """Whether the engine serves; answers as soon as it does not, else after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                await self._engine.health()
            except (EngineClosed, EngineDead):
                return False
            await asyncio.sleep(min(_WATCH_S, left))
        return True

    async def close(self) -> None:
        await self._engine.close()


def _read(text: str, finish_reason: str, opens_thought: bool) -> JudgeAnswer:
    """An answer without its thought, and of one that was cut without its last word."""
    said = visible(text, opens_thought=opens_thought)
    if text.strip() and not said.strip():
        return JudgeAnswer(failure="an answer that is a thought only", said=text)
    said = whole_words(said) if finish_reason == "length" else said
    return JudgeAnswer(said) if said.strip() else JudgeAnswer(failure="an empty answer")

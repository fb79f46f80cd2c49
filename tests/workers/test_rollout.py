"""The rollout worker without its engine."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from troupe.workers.contract.config import EngineConfig, EpisodeConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.engine import generation
from troupe.workers.rollout import RolloutWorker


@pytest.fixture
def config(tiny_model: Path) -> RolloutConfig:
    return RolloutConfig(
        model=ModelConfig(path=str(tiny_model)),
        engine=EngineConfig(max_num_seqs=4, max_model_len=8192),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )


def messages(text: str) -> str:
    return json.dumps([{"role": "user", "content": text}])


def test_short_prompts_are_tokenized_at_once_and_others_in_the_thread(
    config: RolloutConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the thread has a prompt, or reads episodes: two threads never use the tokenizer to encode."""
    where: list[bool] = []

    def encode(*args: Any) -> list[int]:
        where.append(threading.current_thread() is threading.main_thread())
        return encode_prompt(*args)

    monkeypatch.setattr(generation, "encode_prompt", encode)
    short, long = messages("How much is 2 + 3?"), messages("How much is 2 + 3? " * 200)
    tokenizer = load_chat_tokenizer(config.model)

    async def encoded(worker: RolloutWorker, *prompts: str) -> None:
        worker.generation.tokenizer = tokenizer
        ids = await asyncio.gather(*(worker.generation.encode(prompt, None) for prompt in prompts))
        assert ids == [encode_prompt(tokenizer, prompt, 8184) for prompt in prompts]
        worker.generation._tokenizing.shutdown()

    worker = RolloutWorker(config, "rollout-0")
    asyncio.run(encoded(worker, short, short, long, short))
    assert where == [True, True, False, False]
    assert worker.generation._in_thread == 0
    episodes = config.model_copy(update={"episodes": {"": EpisodeConfig()}})
    asyncio.run(encoded(RolloutWorker(episodes, "rollout-0"), short))
    assert where[4:] == [False]

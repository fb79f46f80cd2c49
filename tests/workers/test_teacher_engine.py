"""A teacher in an engine: its engine's settings, what its start refuses, and calls that no engine answers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from troupe.workers import teacher as module
from troupe.workers.contract.config import EngineConfig, TeacherEngineConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import WorkerGone
from troupe.workers.engine.errors import EngineDead
from troupe.workers.engine.serving import Serving, ServingEngine
from troupe.workers.engine.settings import engine_args
from troupe.workers.teacher import TeacherEngine

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

NAME = "teacher.math-0"


def config(top_k: int = 8, device: str = "cpu", model: Path = Path("m"), **engine: int) -> TeacherEngineConfig:
    return TeacherEngineConfig.model_validate(
        {
            "model": ModelConfig(path=str(model)),
            "engine": EngineConfig.model_validate({"max_num_seqs": 4, "max_model_len": 64, "threads": 1} | engine),
            "engine_options": {"scheduling_policy": "priority"},
            "column": "teacher.math",
            "top_k": top_k,
            "device": device,
        }
    )


def arguments(given: TeacherEngineConfig) -> AsyncEngineArgs:
    """The arguments of the teacher's engine of vLLM."""
    return engine_args(TeacherEngine(given, NAME)._settings)


@pytest.mark.parametrize("top_k", [0, 1, 8])
def test_an_engine_returns_as_many_log_probs_as_are_read(tiny_model: Path, top_k: int) -> None:
    engine = TeacherEngine(config(top_k, model=tiny_model), NAME)
    found = engine_args(engine._settings)
    assert (engine._settings.top_logprobs, found.max_logprobs, found.scheduling_policy) == (top_k, -1, "priority")


@pytest.mark.parametrize(
    ("sequences", "longest", "tokens"), [(4, 64, 4 * 64), (32, 4096, 2048), (3000, 4096, 3000), (1, 16, 16)]
)
def test_a_batch_on_a_gpu_has_few_tokens_whose_logits_exist_at_once(
    tiny_model: Path, sequences: int, longest: int, tokens: int
) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": sequences, "max_model_len": longest}
    given = config(device="cuda", model=tiny_model, **sizes)
    assert arguments(given).max_num_batched_tokens == given.batch_tokens == tokens
    assert config(**sizes).batch_tokens == longest, "on the CPU a whole prompt"


@pytest.mark.parametrize(("sleep", "cache", "share"), [("none", None, 0.85), ("weights", 2**30, 0.01)])
def test_an_engine_on_the_policys_gpu_can_sleep_and_has_the_cache_of_the_plan(
    tiny_model: Path, sleep: str, cache: int | None, share: float
) -> None:
    own = {"sleep": sleep, "kv_cache_bytes": cache}
    found = arguments(config(device="cuda", model=tiny_model).model_copy(update=own))
    assert (found.enable_sleep_mode, found.kv_cache_memory_bytes) == (sleep != "none", cache)
    assert found.gpu_memory_utilization == share


class Engine:
    """The engine of vLLM, whose answers never come."""

    def __init__(self) -> None:
        self.errored, self.output_handler, self.ended = False, None, False
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 8)

    async def generate(self, *_: object) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield None

    def shutdown(self, timeout_s: float) -> None:
        self.ended = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Awaitable[tuple[TeacherEngine, Engine]]]:
    """Starts a teacher that reads so many tokens with an engine that knows eight."""
    engine = Engine()

    async def start(serving: ServingEngine, *_: object) -> None:
        serving.vllm, serving.state = cast("Any", engine), Serving.OPEN

    async def nothing(*_: object) -> None:
        """In place of the import of vLLM, and of an answer about its health."""

    monkeypatch.setattr(ServingEngine, "start", start)
    monkeypatch.setattr(ServingEngine, "health", nothing)
    monkeypatch.setattr(module, "import_vllm", nothing)
    monkeypatch.setattr(module, "engine_args", lambda given: None)
    monkeypatch.setattr(module, "unread_metrics", lambda: None)
    monkeypatch.setattr(module, "prompt_logprobs", lambda engine, *_: anext(engine.generate()))

    async def teacher(top_k: int) -> tuple[TeacherEngine, Engine]:
        found = TeacherEngine(config(top_k), NAME)
        await found.start()
        return found, engine

    return teacher


async def test_it_reads_fewer_tokens_than_its_vocabulary_has(started: Any) -> None:
    await started(7)
    for top_k in (8, 9):
        with pytest.raises(ValueError, match=r"algorithm\.distill\.k must be less than the vocabulary, 8 tokens"):
            await started(top_k)


async def test_without_an_engine_its_worker_is_gone() -> None:
    """Before the start; a call that fails with it is repeated on the worker that replaces this one."""
    with pytest.raises(WorkerGone, match=f"{NAME} does not serve: it was not started"):
        await TeacherEngine(config(), NAME).sequences([[1, 2, 3]])


async def test_calls_end_when_it_closes(started: Any) -> None:
    """Without a word of the event loop about futures that nobody has read."""
    reports = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    teacher, engine = await started(2)
    call = asyncio.create_task(teacher.sequences([[1, 2, 3], [4, 5]]))
    await asyncio.sleep(0.01)
    await teacher.close()
    with pytest.raises(WorkerGone, match=f"{NAME} does not serve: it was closed"):
        await asyncio.wait_for(call, 5)
    assert engine.ended
    with pytest.raises(WorkerGone, match="it was closed"):
        await teacher.sequences([[1, 2]])
    del call
    await asyncio.sleep(0.01)
    gc.collect()
    assert reports == []


async def test_calls_end_when_the_process_of_its_engine_dies(started: Any) -> None:
    teacher, engine = await started(2)
    call = asyncio.create_task(teacher.sequences([[1, 2, 3]]))
    await asyncio.sleep(0.01)
    engine.errored = True
    with pytest.raises(EngineDead, match=f"the engine process of {NAME} has ended"):
        await asyncio.wait_for(call, 5)
    with pytest.raises(WorkerGone):
        await teacher.sequences([[1, 2]])

"""An engine releases memory of its GPU while a trainer updates: its KV cache, or its weights too.

After its cache was released, the engine samples from the same weights. After its weights were, it refuses to wake until
new ones are sent, and then serves these. A teacher's come back from host memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.support.workload import GPU_SHARE, MAX_GAP
from tests.gpu.engines import Transfers
from tests.gpu.isolated import Measurements, isolated
from troupe.workers.contract.config import EngineConfig, RolloutConfig, Sleep, TeacherEngineConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.units import GIB
from troupe.workers.engine.sleep import StaleWake
from troupe.workers.teacher import TeacherEngine

LEAST_SHARE = {"kv_cache": 0.3, "weights": 0.5}
"""Share of the engine's memory that has to be free while it sleeps. With a small model most of it is the KV cache."""


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["kv_cache", "weights"])
def test_an_engine_releases_memory_and_serves_the_right_weights_again(
    level: str, demo_model: Path, tmp_path: Path, measured: Callable[[Measurements], None]
) -> None:
    measured(isolated(tmp_path, measure, level, str(demo_model)))


def measure(level: str, model: str) -> Measurements:
    """Sleep and wake."""
    return asyncio.run(Sleeping(Path(model), cast("Sleep", level)).measure())


class Sleeping(Transfers):
    """An engine that sleeps."""

    def __init__(self, model: Path, level: Sleep) -> None:
        super().__init__(model, "ipc", eager=True)
        self._level: Sleep = level

    def rollout_config(self) -> RolloutConfig:
        """Configuration of an engine."""
        return super().rollout_config().model_copy(update={"sleep": self._level})

    async def run(self) -> None:
        """Sleep and wake."""
        before = self.free_bytes()
        self.engines = [await self.start(0)]
        await self.send_and_check("first transfer, s")
        awake = self.free_bytes()
        began = time.monotonic()
        await self.engines[0].sleep()
        self.measurements["sleep, s"] = time.monotonic() - began
        freed, held = self.free_bytes() - awake, max(1, before - awake)
        self.measurements |= {"GiB freed": freed / GIB, "share freed": freed / held}
        assert freed >= LEAST_SHARE[self._level] * held, f"sleep freed {freed / held:.0%} of the engine's memory"
        await (self._wake() if self._level == "kv_cache" else self._wake_refused())
        await self.engines[0].sleep()
        await self.send_and_check("update of an engine that sleeps, s")

    async def _wake(self) -> None:
        """The cache comes back, and the weights are those from before."""
        began = time.monotonic()
        await self.engines[0].wake()
        self.measurements["wake, s"] = time.monotonic() - began
        gap = await self.gap(self.engines[0])
        assert gap <= MAX_GAP, f"samples differ by {gap:.4f} nats per token after waking"
        self.measurements["nats per token after waking"] = gap

    async def _wake_refused(self) -> None:
        """Weights that were discarded are not sampled from."""
        with pytest.raises(StaleWake):
            await self.engines[0].wake()

    def free_bytes(self) -> int:
        """See `free_bytes`."""
        return free_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["kv_cache", "weights"])
def test_a_teacher_has_its_weights_again_after_it_has_slept(
    level: str, demo_model: Path, tmp_path: Path, measured: Callable[[Measurements], None]
) -> None:
    measured(isolated(tmp_path, measure_teacher, level, str(demo_model)))


def measure_teacher(level: str, model: str) -> Measurements:
    """Score, sleep, wake and score again."""
    config = TeacherEngineConfig(
        model=ModelConfig(path=model, dtype="bfloat16"),
        engine=EngineConfig(max_num_seqs=8, max_model_len=256, enforce_eager=True, gpu_memory_utilization=GPU_SHARE),
        device="cuda",
        sleep=cast("Sleep", level),
    )
    return asyncio.run(check_teacher(TeacherEngine(config, "teacher.one-0"), level, free_bytes))


async def check_teacher(teacher: TeacherEngine, level: str, free: Callable[[], int]) -> Measurements:
    """Whether it releases its memory, twice, and scores as before."""
    sequences = [list(range(start, start + 200)) for start in (100, 900)]
    before, measurements = free(), dict[str, float | str]()
    await teacher.start()
    try:
        awake, wanted = free(), await scores(teacher, sequences)
        for number in range(2):
            began = time.monotonic()
            await teacher.sleep()
            measurements[f"sleep {number}, s"] = time.monotonic() - began
            freed, held = free() - awake, max(1, before - awake)
            assert freed >= LEAST_SHARE[level] * held, f"sleep freed {freed / held:.0%} of the engine's memory"
            measurements |= {"GiB freed": freed / GIB, "share freed": freed / held}
            began = time.monotonic()
            await teacher.wake()
            measurements[f"wake {number}, s"] = time.monotonic() - began
            gap = float(np.abs(await scores(teacher, sequences) - wanted).mean())
            assert gap <= MAX_GAP, f"log-probs differ by {gap:.4f} nats per token after waking"
            measurements["nats per token after waking"] = gap
    finally:
        await teacher.close()
    return measurements


async def scores(teacher: TeacherEngine, sequences: list[list[int]]) -> np.ndarray:
    """The log-probs of all tokens behind the first."""
    found = await teacher.sequences(sequences)
    assert not any(isinstance(one, str) for one in found), found
    return np.stack([one.logprobs[:, 0] for one in found if not isinstance(one, str)])


def free_bytes() -> int:
    """Free memory of the GPU, over all processes."""
    return int(torch.cuda.mem_get_info()[0])


class FakeEngine:
    """An engine that sleeps, and wakes in the right or in the wrong order."""

    def __init__(self, *, stale: bool) -> None:
        self.stale = stale

    async def sleep(self) -> None:
        return None

    async def wake(self) -> None:
        if not self.stale:
            raise StaleWake("discarded")


class FakeSleeping(Sleeping):
    """The check with an engine without memory of its own."""

    def __init__(self, level: Sleep, *free: int, stale: bool = False) -> None:
        self._level = level
        self.measurements = {}
        self._free = iter(free)
        self._engine: Any = FakeEngine(stale=stale)

    async def start(self, number: int) -> Any:
        return self._engine

    async def send_and_check(self, label: str) -> None:
        self.measurements[label] = 1.0

    async def gap(self, worker: Any) -> float:
        return 0.01

    def free_bytes(self) -> int:
        return next(self._free)


async def test_a_wrong_sleep_is_found() -> None:
    right = FakeSleeping("kv_cache", 100, 20, 80, stale=True)
    await right.run()
    assert right.measurements["share freed"] == 0.75
    await FakeSleeping("weights", 100, 20, 80).run()
    with pytest.raises(AssertionError, match="freed 12%"):
        await FakeSleeping("weights", 100, 20, 30).run()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await FakeSleeping("weights", 100, 20, 80, stale=True).run()


class FakeTeacher:
    """A teacher that wakes with its weights, or with others."""

    def __init__(self, *, wakes_as: float) -> None:
        self.weights = -1.0
        self._wakes_as = wakes_as

    async def start(self) -> None: ...

    async def sleep(self) -> None: ...

    async def close(self) -> None: ...

    async def wake(self) -> None:
        self.weights = self._wakes_as

    async def sequences(self, sequences: list[list[int]]) -> list[Any]:
        return [SimpleNamespace(logprobs=np.full((len(one) - 1, 1), self.weights)) for one in sequences]


async def test_a_teacher_that_wakes_with_other_weights_is_found() -> None:
    def free() -> Callable[[], int]:
        return iter([100, 20, 90, 90]).__next__

    found = await check_teacher(cast("Any", FakeTeacher(wakes_as=-1.0)), "weights", free())
    assert found["share freed"] == 70 / 80
    with pytest.raises(AssertionError, match=r"log-probs differ by 1\.0000 nats"):
        await check_teacher(cast("Any", FakeTeacher(wakes_as=-2.0)), "weights", free())
    with pytest.raises(AssertionError, match="freed 12%"):
        await check_teacher(cast("Any", FakeTeacher(wakes_as=-1.0)), "weights", iter([100, 20, 30]).__next__)

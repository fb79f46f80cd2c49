"""An engine sleeps and wakes, on a stand-in with vLLM's rules: what wakes, what resumes, and what still reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig, Sleep, TeacherEngineConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import WorkerGone
from troupe.workers.engine.serving import Serving
from troupe.workers.engine.sleep import GONE, MemoryState, StaleWake
from troupe.workers.reference_engine import ReferenceEngine
from troupe.workers.rollout import RolloutWorker
from troupe.workers.teacher import TeacherEngine
from troupe.workers.weights.file import WeightDigestMismatch

TAGS = {"weights", "kv_cache"}


class Vllm:
    """vLLM's sleep mode as `EngineCore`, `Executor` and `CuMemAllocator` of 0.32 have it."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.paused = False
        self.weights = "digest-7"
        self.version = "7"
        self.loaded: dict[str, Any] = {"version": 7, "digest": "digest-7", "mismatch": ""}
        self.errored = False
        self.calls: list[str] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.in_host_memory: str | None = None
        self.running: list[asyncio.Task[Any]] = []
        """Requests under way."""

    @property
    def samples_from(self) -> str | None:
        """The weights that a request is computed with now; None: requests wait."""
        return None if self.paused else self.weights

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        if mode == "wait":
            await asyncio.gather(*self.running)
        else:
            assert mode == "keep"
        self.paused = True

    async def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep"
        self.calls.append(f"sleep {level}")
        self.paused = True
        if "weights" not in self.asleep:  # of level 2 the version and `loaded` stay
            self.in_host_memory, self.weights = self.weights if level == 1 else None, "garbage"
        self.asleep = set(TAGS)

    async def release_kv_cache_memory(self) -> None:
        if not self.paused or self.asleep:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.calls.append("release")
        self.asleep = {"kv_cache"}

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(f"wake {tags}")
        if not set(tags or ()) <= self.asleep:
            return False  # vLLM warns, and wakes nothing
        woken = set(tags or TAGS) & self.asleep
        self.asleep -= woken
        if "weights" in woken and self.in_host_memory is not None:
            self.weights, self.in_host_memory = self.in_host_memory, None
        if not self.asleep:
            self.paused = False  # by itself
        return not self.asleep

    async def resume_generation(self) -> None:
        assert not self.asleep, "the scheduler would run on memory that is not there"
        self.paused = False

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version

    async def start_weight_update(self) -> None:
        assert "weights" not in self.asleep, "weights are copied into memory that is not there"
        self.loaded = {"version": None, "digest": "", "mismatch": ""}

    async def finish_weight_update(self, version: str) -> None:
        self.version = version

    async def collective_rpc(self, method: str) -> list[Any]:
        match method:
            case "troupe_loaded_weights":
                return [self.loaded]
            case "troupe_forget_weights":
                self.loaded = {"version": None, "digest": "", "mismatch": ""}
        return [None]

    def receive(self, version: int) -> None:
        """Weights arrive."""
        self.weights = f"digest-{version}"
        self.loaded = {"version": version, "digest": self.weights, "mismatch": ""}


def opened(sleep: Sleep, vllm: Vllm) -> RolloutWorker:
    """A worker whose engine is the stand-in."""
    config = RolloutConfig(
        model=ModelConfig(path="model"),
        engine=EngineConfig(),
        sampling=SamplingConfig(),
        seed=1,
        transfer_backend="ipc",
        device="cpu",
        sleep=sleep,
    )
    worker = RolloutWorker(config, "rollout-0")
    worker.engine.vllm, worker.engine.state = vllm, Serving.OPEN  # pyright: ignore[reportAttributeAccessIssue]
    return worker


def frozen(sleep: Sleep, vllm: Vllm, kind: str) -> TeacherEngine | ReferenceEngine:
    """A worker with a frozen model whose engine is the stand-in."""
    given = {"model": ModelConfig(path="model"), "engine": EngineConfig(), "device": "cpu", "sleep": sleep}
    if kind == "teacher":
        worker = TeacherEngine(TeacherEngineConfig.model_validate(given), "teacher.math-0")
        engine = worker._engine
    else:
        given |= {"sampling": SamplingConfig(), "seed": 1, "transfer_backend": "shm"}
        worker = ReferenceEngine(RolloutConfig.model_validate(given), "reference_engine-0")
        engine = worker.engine
    engine.vllm, engine.state = vllm, Serving.OPEN  # pyright: ignore[reportAttributeAccessIssue]
    return worker


@pytest.mark.parametrize("kind", ["teacher", "reference"])
@pytest.mark.parametrize(
    ("sleep", "gone", "calls"), [("kv_cache", {"kv_cache"}, "release"), ("weights", TAGS, "sleep 1")]
)
async def test_frozen_weights_wake_as_they_were(kind: str, sleep: Sleep, gone: set[str], calls: str) -> None:
    """Nobody sends them again: what leaves the GPU is in host memory. Both calls may be repeated."""
    vllm = Vllm()
    worker = frozen(sleep, vllm, kind)
    for _ in range(2):
        await worker.sleep()
        await worker.sleep()
        assert (vllm.asleep, vllm.samples_from) == (gone, None)
        assert (await worker.health()).version == 7, "a sleeping engine is healthy"
        await worker.wake()
        await worker.wake()
        assert (vllm.asleep, vllm.samples_from) == (set(), "digest-7")
    assert vllm.calls == 2 * [calls, "wake None"]


@pytest.mark.parametrize("sleep", ["kv_cache", "weights"])
async def test_a_teacher_finishes_what_runs_before_it_sleeps(sleep: Sleep) -> None:
    """vLLM's newer runner keeps the log-probs of a prompt's computed part when a request is begun again."""
    vllm = Vllm()
    teacher = frozen(sleep, vllm, "teacher")
    vllm.running.append(asyncio.create_task(asyncio.sleep(0.02, "log-probs")))
    sleeping = asyncio.create_task(teacher.sleep())
    await asyncio.sleep(0.001)
    assert not vllm.asleep and not vllm.running[0].done()
    await sleeping
    assert vllm.asleep and vllm.running[0].result() == "log-probs"


async def test_a_teacher_that_does_not_wake_says_so_and_scores_nothing() -> None:
    vllm = Vllm()
    teacher = frozen("weights", vllm, "teacher")
    await teacher.sleep()

    async def fail(tags: list[str] | None = None) -> bool:
        raise RuntimeError("no memory for the weights")

    vllm.wake_up = fail
    with pytest.raises(RuntimeError, match="no memory for the weights"):
        await teacher.wake()
    assert vllm.samples_from is None


@pytest.mark.parametrize("sleep", ["kv_cache", "weights"])
async def test_the_cache_wakes_after_the_weights_are_verified_and_only_then_sampling_resumes(sleep: Sleep) -> None:
    vllm = Vllm()
    worker = opened(sleep, vllm)
    await worker.sleep()
    assert vllm.asleep == (TAGS if sleep == "weights" else {"kv_cache"})
    assert (await worker.health()).version == (GONE if sleep == "weights" else 7), "a sleeping engine is healthy"
    await worker.transfer_start()
    assert vllm.asleep == {"kv_cache"}
    vllm.receive(8)
    assert vllm.samples_from is None
    await worker.transfer_finish(8, "digest-8")
    assert (vllm.asleep, vllm.samples_from, worker.engine.state) == (set(), "digest-8", Serving.OPEN)
    assert (await worker.health()).version == 8
    assert worker.memory.state is MemoryState.AWAKE


async def test_a_sleeping_engine_with_its_weights_wakes_without_an_update() -> None:
    vllm = Vllm()
    worker = opened("kv_cache", vllm)
    await worker.sleep()
    await worker.sleep()
    assert vllm.calls == ["release"]
    await worker.wake()
    await worker.wake()
    assert (vllm.samples_from, vllm.calls) == ("digest-7", ["release", "wake ['kv_cache']"])


async def test_requests_under_way_sleep_with_the_engine() -> None:
    """A trainer is restarted while its engine samples. To vLLM, paused requests are no unfinished ones."""
    vllm = Vllm()
    worker = opened("kv_cache", vllm)
    request = asyncio.create_task(asyncio.sleep(60))
    worker.engine.running.add(request)
    await worker.sleep()
    assert (vllm.asleep, vllm.samples_from, vllm.weights) == ({"kv_cache"}, None, "digest-7")
    await worker.wake()
    assert vllm.samples_from == "digest-7" and not request.cancelled()
    request.cancel()


async def test_weights_that_were_discarded_do_not_serve_without_new_ones() -> None:
    vllm = Vllm()
    worker = opened("weights", vllm)
    await worker.sleep()
    with pytest.raises(StaleWake, match="were discarded"):
        await worker.wake()
    assert vllm.samples_from is None


async def test_a_wake_behind_the_workers_back_is_caught_by_the_digest() -> None:
    """vLLM reports the old version over garbage: without the digest the engine would serve it."""
    vllm = Vllm()
    worker = opened("weights", vllm)
    await worker.sleep()
    await vllm.wake_up(["weights"])
    assert vllm.weights == "garbage"
    with pytest.raises(WeightDigestMismatch, match="rollout-0"):
        await worker.transfer_finish(7, "digest-7")
    assert (vllm.samples_from, worker.engine.state) == (None, Serving.CLOSED)


@pytest.mark.parametrize("sleep", ["kv_cache", "weights"])
async def test_after_a_failed_update_the_engine_stays_closed_with_no_cache_and_takes_the_next_one(sleep: Sleep) -> None:
    vllm = Vllm()
    worker = opened(sleep, vllm)
    await worker.sleep()
    await worker.transfer_start()
    vllm.receive(8)
    with pytest.raises(WeightDigestMismatch):
        await worker.transfer_finish(8, "another")
    assert (vllm.asleep, vllm.samples_from, worker.engine.state) == ({"kv_cache"}, None, Serving.CLOSED)
    with pytest.raises(StaleWake, match="were not verified"):
        await worker.memory._take_cache()
    await worker.sleep()
    assert worker.engine.state is Serving.CLOSED and "digest" in worker.engine.closed_because
    await worker.transfer_start()
    vllm.receive(9)
    await worker.transfer_finish(9, "digest-9")
    assert (vllm.asleep, vllm.samples_from) == (set(), "digest-9")


async def test_an_engine_without_sleep_resumes_as_before_and_does_not_sleep() -> None:
    vllm = Vllm()
    worker = opened("none", vllm)
    await worker.transfer_start()
    vllm.receive(8)
    await worker.transfer_finish(8, "digest-8")
    assert (vllm.samples_from, vllm.calls) == ("digest-8", [])
    with pytest.raises(ValueError, match="none does not sleep"):
        await worker.sleep()


@pytest.mark.parametrize(("sleep", "method"), [("none", "resume_generation"), ("kv_cache", "wake_up")])
async def test_an_engine_that_does_not_resume_is_closed_and_takes_the_next_update(sleep: Sleep, method: str) -> None:
    vllm = Vllm()
    worker = opened(sleep, vllm)
    if sleep != "none":
        await worker.sleep()
    own = getattr(vllm, method)

    async def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no memory for the cache")

    await worker.transfer_start()
    vllm.receive(8)
    setattr(vllm, method, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        await worker.transfer_finish(8, "digest-8")
    setattr(vllm, method, own)
    assert worker.engine.state is Serving.CLOSED and "no memory for the cache" in worker.engine.closed_because
    await worker.transfer_start()
    vllm.receive(9)
    await worker.transfer_finish(9, "digest-9")
    assert (vllm.samples_from, worker.engine.state) == ("digest-9", Serving.OPEN)


async def test_an_engine_with_several_processes_is_replaced_after_a_failed_call() -> None:
    """Its next digests would be those of the call before: vLLM leaves answers behind the first failure unread."""
    vllm = Vllm()
    worker = opened("none", vllm)

    async def fail() -> None:
        raise Exception(
            "Call to start_weight_update method failed: Worker failed with error 'rank 1: the sender has left'"
        )

    vllm.start_weight_update = fail
    with pytest.raises(WorkerGone, match=r"rollout-0 must be replaced, .* the sender has left"):
        await worker.transfer_start()
    with pytest.raises(WorkerGone, match="rollout-0 must be replaced"):
        await worker.health()
    with pytest.raises(WorkerGone, match="rollout-0 must be replaced"):
        await worker.transfer_start()

"""The meter of an engine adds up what vLLM reports. Against the real engine: `tests/real/test_wheel.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from troupe.workers.measured_rollout import EngineMeter


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """What vLLM reports of iterations, and the meter that it reports to."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.meter = EngineMeter(self._clock)

    def iteration(
        self,
        seconds: float,
        prompt: int = 0,
        sampled: int = 0,
        *,
        prefilling: int = 0,
        decoding: int = 0,
        done: Any = None,
        **scheduler: Any,
    ) -> None:
        """One iteration, which ends `seconds` after the one before it."""
        self._clock.now += seconds
        details = SimpleNamespace(
            elapsed_ms=0.0,  # the engine does not see all of its time
            num_ctx_tokens=prompt,
            num_ctx_requests=prefilling,
            num_generation_tokens=sampled,
            num_generation_requests=decoding,
            is_dummy=False,
        )
        usual = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0}
        self.meter.record(SimpleNamespace(iteration_details=details, **(usual | scheduler)), done)


def finished(**values: Any) -> Any:
    """vLLM's statistics of one finished request."""
    usual = {"queued_time": 0.25, "prefill_time": 0.5, "inference_time": 2.0, "num_prompt_tokens": 10}
    return SimpleNamespace(**(usual | {"num_cached_tokens": 8, "num_generation_tokens": 5} | values))


def requests(*done: Any, preempted: int = 0) -> Any:
    return SimpleNamespace(num_preempted_reqs=preempted, finished_requests=list(done))


def test_iterations_with_prompts_are_prefill_and_the_others_decode() -> None:
    engine = Engine()
    engine.iteration(1.0, prompt=100, prefilling=4)
    engine.iteration(0.5, prompt=10, sampled=4, prefilling=1, decoding=4)
    engine.iteration(2.5, sampled=50, decoding=5)
    reading = engine.meter.read("rollout-0")
    assert (reading.prefill_s, reading.prefill_tokens) == (1.5, 110)
    assert (reading.decode_s, reading.decode_tokens) == (2.5, 50)
    assert reading.busy_s == 4.0 and reading.most_running == 5
    assert reading.running == pytest.approx((1.0 * 4 + 0.5 * 5 + 2.5 * 5) / 4.0)


def test_queue_and_cache_are_weighted_with_the_time_of_the_iterations() -> None:
    engine = Engine()
    engine.iteration(1.0, num_waiting_reqs=6, num_skipped_waiting_reqs=2, kv_cache_usage=0.9)
    engine.iteration(3.0, kv_cache_usage=0.1, done=requests(preempted=2))
    reading = engine.meter.read("rollout-0")
    assert reading.waiting == 2.0
    assert (reading.kv_use, reading.most_kv_use) == (pytest.approx(0.3), 0.9)
    assert reading.preemptions == 2


def test_a_pause_is_no_part_of_the_iteration_after_it() -> None:
    engine = Engine()
    engine.iteration(1.0, sampled=1)
    engine.iteration(3.0, sampled=1, num_running_reqs=0)
    engine.iteration(60.0, sampled=1)
    engine.iteration(1.5, sampled=1)
    assert engine.meter.read("rollout-0").busy_s == 1.0 + 3.0 + 2.0 + 1.5


def test_sequences_have_their_latencies() -> None:
    meter = EngineMeter()
    meter.record(None, requests(finished(), finished(queued_time=-0.1, num_cached_tokens=0)))
    first, second = meter.read("rollout-0").sequences
    assert (first.queued_s, first.first_token_s, first.latency_s) == (0.25, 0.75, 2.25)
    assert (first.prompt_tokens, first.cached_tokens, first.response_tokens) == (10, 8, 5)
    assert second.queued_s == 0.0, "clocks that differ by a moment give no negative time"


def test_a_reading_starts_the_next_one_and_dummy_iterations_do_not_count() -> None:
    engine = Engine()
    dummy = SimpleNamespace(iteration_details=SimpleNamespace(is_dummy=True))
    engine.meter.record(dummy, None)
    engine.meter.record(SimpleNamespace(iteration_details=None), None)
    assert engine.meter.read("rollout-0").busy_s == 0.0
    engine.iteration(1.0, sampled=2, done=requests(finished()))
    assert engine.meter.read("rollout-0").response_tokens == 5
    empty = engine.meter.read("rollout-0")
    assert (empty.busy_s, empty.running, empty.sequences) == (0.0, 0.0, ())

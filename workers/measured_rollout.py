"""A rollout worker that measures its engine (`troupe bench`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.config import RolloutConfig, SamplingConfig
from troupe.workers.contract.measurements import EngineReading, FinishedSequence
from troupe.workers.engine.settings import check_structured
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


class MeasuredRollout(RolloutWorker):
    """The rollout worker of a run, with a meter in its engine; see `MeasuredEngine`."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self._meter = EngineMeter()
        self.stat_loggers.append(lambda config, index: self._meter)

    def engine_args(self) -> AsyncEngineArgs:
        """Arguments of a run's engine, which also reports its iterations in detail."""
        arguments = super().engine_args()
        arguments.enable_logging_iteration_details = True
        return arguments

    async def use_sampling(self, sampling: SamplingConfig) -> None:
        """Sample with these settings from now on. Raises ValueError if vLLM cannot read their form."""
        check_structured(sampling.structured)
        self.generation.config = self.generation.config.model_copy(update={"sampling": sampling})

    async def read_meter(self) -> EngineReading:
        """Work of the engine since the last reading."""
        return self._meter.read(self.engine.name)


class EngineMeter:
    """A stat logger of vLLM (`StatLoggerBase`, not imported). It reads the details of iterations
    (`enable_logging_iteration_details`). An iteration takes the time since the one before: vLLM's own leaves out
    what overlaps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._sequences: list[FinishedSequence] = []
        self._prefill_s = self._decode_s = 0.0
        self._prefill_tokens = self._decode_tokens = self._preemptions = 0
        self._running = self._waiting = self._kv_use = 0.0
        """Sums over iterations, each weighted with its time."""
        self._most_running = 0
        self._most_kv_use = 0.0
        self._iterations = 0
        self._last = self._clock()
        """End of the last iteration, or the last reading: work follows it at once."""
        self._idle = False
        """Whether the engine had nothing to do after its last iteration."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Adds what vLLM reports; called by `AsyncLLM` after every iteration."""
        if scheduler_stats is not None and scheduler_stats.iteration_details is not None:
            self._add_iteration(scheduler_stats)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._sequences += [_finished(request) for request in iteration_stats.finished_requests]

    def log(self, *_: object) -> None:
        """Part of vLLM's interface: `read` returns the measurements, and a measured engine does not sleep."""

    log_engine_initialized = record_sleep_state = log

    def read(self, engine: str) -> EngineReading:
        """The measurements since the last reading."""
        busy_s = self._prefill_s + self._decode_s
        share = 1 / busy_s if busy_s > 0 else 0.0
        reading = EngineReading(
            engine=engine,
            sequences=tuple(self._sequences),
            prefill_s=self._prefill_s,
            prefill_tokens=self._prefill_tokens,
            decode_s=self._decode_s,
            decode_tokens=self._decode_tokens,
            running=self._running * share,
            most_running=self._most_running,
            waiting=self._waiting * share,
            kv_use=self._kv_use * share,
            most_kv_use=self._most_kv_use,
            preemptions=self._preemptions,
        )
        self._reset()
        return reading

    def _add_iteration(self, stats: Any) -> None:
        details = stats.iteration_details
        if details.is_dummy:
            return
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        seconds = self._iteration_s()
        self._idle = stats.num_running_reqs + waiting == 0
        if details.num_ctx_tokens:
            self._prefill_s += seconds
            self._prefill_tokens += details.num_ctx_tokens
        else:
            self._decode_s += seconds
            self._decode_tokens += details.num_generation_tokens
        running = details.num_ctx_requests + details.num_generation_requests
        self._running += running * seconds
        self._waiting += waiting * seconds
        self._kv_use += stats.kv_cache_usage * seconds
        self._most_running = max(self._most_running, running)
        self._most_kv_use = max(self._most_kv_use, stats.kv_cache_usage)

    def _iteration_s(self) -> float:
        """Time of the iteration that ends now; after a pause, at most the mean time."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        if self._idle and self._iterations:
            seconds = min(seconds, (self._prefill_s + self._decode_s) / self._iterations)
        self._iterations += 1
        return seconds


def _finished(request: Any) -> FinishedSequence:
    """vLLM's statistics of a finished request."""
    queued_s = max(0.0, request.queued_time)
    return FinishedSequence(
        queued_s=queued_s,
        first_token_s=queued_s + max(0.0, request.prefill_time),
        latency_s=queued_s + max(0.0, request.inference_time),
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        response_tokens=request.num_generation_tokens,
    )

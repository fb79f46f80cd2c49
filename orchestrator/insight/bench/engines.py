"""`troupe bench`: starts the engines of a spec, without trainers, and measures every point of a sweep on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from troupe.orchestrator.cluster.actors import actor_class
from troupe.orchestrator.cluster.event_loop import gather_all, rare_collections
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.data.mixture import group_settings, prompt_order
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import load_train_pool
from troupe.orchestrator.errors import DoesNotFit, StopRequested, TroupeError, WorkerError
from troupe.orchestrator.hub.resolve import fetch
from troupe.orchestrator.insight.bench.batches import BatchPrompts, SamplingBatches
from troupe.orchestrator.insight.bench.points import Point, launch_spec, launches, measured_spec
from troupe.orchestrator.insight.bench.results import MeasuredBatch, Result, measures_of
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.roles.table import SAMPLERS, named
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.runs.session import RunRequest, Session, open_session
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.workers.contract.measurements import EngineReading, MeasuredEngine
from troupe.workers.contract.messages import Peak
from troupe.workers.contract.roles import RolloutEngine

_WORKER = "troupe.workers.measured_rollout:MeasuredRollout"
_METER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class BenchRequest:
    """What to measure."""

    points: Sequence[Point]
    batches: int
    address: str | None
    """Ray cluster to join, or None to start one on this machine."""


OnResults = Callable[[Sequence[Result]], None]
"""Called after every point with all results so far, in the order of the points."""


def bench(request: BenchRequest, console: Console, on_results: OnResults) -> None:
    """Measures all points; one that cannot be measured has a problem instead of measures. `on_results`: receives the
    results. The last call has the results of all points. Raises TroupeError if there is no cluster or no data, or the
    user stopped the command."""
    asyncio.run(_bench(request, console, on_results))


async def _bench(request: BenchRequest, console: Console, on_results: OnResults) -> None:
    pools = _prompt_pools(request.points, console)
    found: dict[str, Result] = {}

    def add(result: Result) -> None:
        found[_key(result.point)] = result
        on_results([found[key] for point in request.points if (key := _key(point)) in found])

    waiting = launches(request.points)
    while waiting:
        points = waiting.pop(0)
        await _launch(request, points, pools, console, add)
        if left := [point for point in points if _key(point) not in found]:
            waiting.insert(0, left)


def _prompt_pools(points: Sequence[Point], console: Console) -> dict[str, Pool]:
    """The training prompts by `_data_key`; sources that points share are read once. Raises DataError."""
    pools: dict[str, Pool] = {}
    for point in points:
        if (key := _data_key(point)) not in pools:
            spec = fetch(point.spec, console).spec
            pools[key] = load_train_pool(spec.data, spec.failures.on_bad_row, plain=spec.model.plain)
    return pools


async def _launch(
    request: BenchRequest,
    points: Sequence[Point],
    pools: Mapping[str, Pool],
    console: Console,
    add: Callable[[Result], None],
) -> None:
    """Adds the results of the points until one fails; at least one result. The others need other engines."""
    spec = launch_spec(points)
    run = measured_run(spec, request.address)
    roles = named(lambda row: row.samples or row.behind == RolloutEngine.generate.__name__)
    measured = 0
    warm = 0  # engines that have sampled: the first batch of an engine is slower
    try:
        async with open_session(run, console, roles=roles) as session, rare_collections():
            for point in points:
                prompts, warm_up = pools[_data_key(point)], point.workers > warm
                bench = _PointBench(request, point, prompts, session, warm_up=warm_up)
                console.message(f"measuring {point.label or point.spec.name}")
                try:
                    add(await session.unless_stopped(bench.run()))
                except StopRequested:
                    raise
                except TroupeError as error:
                    add(Result(point, None, str(error)))
                    break
                finally:
                    measured += 1
                warm = max(warm, point.workers)
    except DoesNotFit as error:
        for point in points:
            if point.workers == spec.roles.rollout.workers:
                add(Result(point, None, str(error)))
    except WorkerError as error:  # an engine does not start, as with too little memory
        for point in points[measured:]:
            add(Result(point, None, explained(error)))


def measured_run(spec: RolloutSpec, address: str | None) -> RunRequest:
    """A run whose engines can be measured."""
    engine = actor_class(_WORKER, MeasuredEngine, concurrent=True)
    return RunRequest(spec, Path(), False, address, dict.fromkeys(SAMPLERS, engine))


def explained(error: TroupeError) -> str:
    """An error with its notes, such as the folder of the workers' logs."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


class _PointBench:
    def __init__(self, request: BenchRequest, point: Point, prompts: Pool, session: Session, *, warm_up: bool) -> None:
        self._request = request
        self._prompts = prompts
        self._point = point
        self._spec = point.spec
        self._settings = group_settings(point.spec, prompts)
        engines = session.workers.engines[: point.workers]
        self._session = replace(session, workers=session.workers.with_engines(engines))
        self._engines = engines
        self._meters = [cast("WorkerHandle[MeasuredEngine]", engine.handle) for engine in engines]
        self._unmeasured = int(warm_up)
        """Batches before the first measured one."""

    async def run(self) -> Result:
        batches = self._unmeasured + self._request.batches
        spec = measured_spec(self._spec, batches)
        picks = BatchPrompts(prompt_order(spec, self._prompts), batches, spec.schedule.prompts_per_step)
        pools = RunPools(spec, self._session)
        table = self._session.cluster.put(self._prompts.table)
        use = MeasuredEngine.use_sampling
        await gather_all(meter.call(use, _METER_TIMEOUT_S, spec.sampling) for meter in self._meters)
        sampling = SamplingBatches(spec, pools.engines, picks.next, table, self._settings)
        measured: list[MeasuredBatch] = []
        try:
            await pools.start()
            for number in range(batches):
                self._session.console.phase("measure", number, batches, unit="batches")
                measured.append(await self._batch(sampling))
        finally:
            await sampling.close()
            await pools.close()
        return Result(
            self._point,
            measures_of(self._point, measured[self._unmeasured :]),
            peak=await self._peak(),
            gpu_type=self._session.cluster.gpu_type() if spec.device == "cuda" else "",
        )

    async def _batch(self, sampling: SamplingBatches) -> MeasuredBatch:
        """The next batch, with empty caches and meters at its beginning."""
        timeout_s = self._spec.schedule.generate_timeout_s
        await gather_all(engine.handle.call(RolloutEngine.reset_prefix_cache, timeout_s) for engine in self._engines)
        await self._readings()
        batch = await sampling.run()
        readings = tuple(await self._readings())
        return MeasuredBatch(batch.seconds, batch.response_tokens, readings)

    async def _peak(self) -> Peak:
        calls = (engine.handle.call(RolloutEngine.health, _METER_TIMEOUT_S) for engine in self._engines)
        await gather_all(calls)  # the answers report it
        return self._session.cluster.peaks.of(role_of(self._engines[0].name))

    async def _readings(self) -> Sequence[EngineReading]:
        """What every engine did since its last reading."""
        return await gather_all(meter.call(MeasuredEngine.read_meter, _METER_TIMEOUT_S) for meter in self._meters)


def _key(point: Point) -> str:
    return repr(sorted(point.settings.items()))


def _data_key(point: Point) -> str:
    """Equal for points with the same prompts."""
    return repr((point.spec.data.train, point.spec.failures.on_bad_row, point.spec.model.plain))

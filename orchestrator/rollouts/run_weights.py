"""The weights of a run: every version goes to the engines while the loop waits, or during the next update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any, TypeVar

from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.rollouts.weight_sync import SyncReport, WeightSync
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.training.batch import unless_failed

T = TypeVar("T")

_MOST_DIGESTS = 64
"""Engines whose acknowledgement an event names."""


class RunWeights:
    """Brings the versions of the policy's weights to the engines, one at a time. `publish` leaves the loading to a
    task, which waits for the engines and ends when all of them have acknowledged the version or are lost. The next
    version waits for it, as does `settle`; its error ends what runs in `guard`."""

    def __init__(
        self, sync: WeightSync, calls: RecoverableCalls, recorder: RunRecorder, served: Callable[[int], None]
    ) -> None:
        """Sends nothing yet; `served` is called with each version once every engine has it."""
        self._sync = sync
        self._calls = calls
        self._recorder = recorder
        self._served = served
        self._loading: asyncio.Task[None] | None = None

    async def push(self, version: int) -> None:
        """Loads the policy's weights into every engine as `version`. Raises TroupeError."""
        await self.settle()
        self._loaded(await self._calls.retry(lambda: self._sync.push(version)))

    async def publish(self, version: int) -> None:
        """Pushes, but waits only until the policy may train again: a task makes the engines load the version. Raises
        TroupeError if the weights are not published, or the engines could not load the previous version."""
        await self.settle()
        await self._calls.retry(lambda: self._sync.publish(version))
        self._loading = asyncio.create_task(self._load(version), name=f"load version {version}")

    async def settle(self) -> None:
        """Waits until the engines have loaded the version that was published. Raises TroupeError."""
        if self._loading is not None:
            await asyncio.wait({self._loading})
            loading, self._loading = self._loading, None
            loading.result()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which is cancelled if the engines cannot load what was published. Raises TroupeError."""
        return await (work if self._loading is None else unless_failed(self._loading, work))

    async def cancel(self) -> None:
        """Stops waiting for engines that load, in a run that has failed."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    async def _load(self, version: int) -> None:
        """Makes every engine load the published version, in the background. Slots of the scheduler that wait for a
        version that did not arrive wait for the next one. The policy trains on what the earlier ones have left, and
        then waits: a version is published again at the latest when none is left."""
        try:
            report = await self._calls.retry(self._sync.load)
        except WorkerError as error:
            error.locate(version, "sync")
            raise
        if report is not None:
            self._loaded(report)

    def _loaded(self, report: SyncReport) -> None:
        digests = dict(islice(report.engines.items(), _MOST_DIGESTS))
        fields = {"version": report.version, "digest": report.digest, "bytes": report.nbytes}
        fields |= {"to_nodes": report.to_nodes, "seconds": round(report.publish_s + report.apply_s, 4)}
        self._recorder.events.record("weights", **fields, loaded=len(report.engines), engines=digests)
        self._served(report.version)

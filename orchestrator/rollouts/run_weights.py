"""The weights of a run: every version goes to the engines while the loop waits, or during the next update."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any, TypeVar

from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.errors import UpdateDamaged, WorkerError
from troupe.orchestrator.rollouts.weight_sync import SyncReport, WeightSync
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.training.batch import unless_failed

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_DIGESTS = 64
"""Engines whose acknowledgement an event names."""


class RunWeights:
    """Brings the versions of the policy's weights to the engines, one at a time.

    `publish` leaves the loading to a task, which waits for the engines and ends when all of them have acknowledged the
    version or are lost. The next version waits for it, as does `settle`; its error ends what runs in `guard`.
    """

    def __init__(
        self,
        sync: WeightSync,
        calls: RecoverableCalls,
        recorder: RunRecorder,
        served: Callable[[int], None],
    ) -> None:
        """Sends nothing yet; `served` is called with each version once every engine has it."""
        self._sync = sync
        self._calls = calls
        self._recorder = recorder
        self._served = served
        self._loading: asyncio.Task[None] | None = None
        self._missed = False
        """Whether the last version did not arrive everywhere."""

    async def push(self, version: int) -> None:
        """Loads the policy's weights into every engine as `version`. Raises TroupeError."""
        await self.settle()
        self._loaded(await self._calls.retry(lambda: self._sync.push(version)))

    async def publish(self, version: int) -> None:
        """Pushes, but waits only until the policy may train again: a task makes the engines load the version.

        Raises:
            TroupeError: The weights are not published, or the engines could not load the previous version.
        """
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
        """Makes every engine load the published version, in the background.

        A version that did not arrive everywhere cannot be published again, for the policy trains. An engine that did
        not load it serves nothing until it has the next version, which is the last chance. Slots of the scheduler that
        wait for the version wait for the next one.
        """
        try:
            report = await self._calls.retry(self._sync.load)
        except UpdateDamaged as error:
            if self._missed:
                error.locate(version, "sync")
                raise
            self._missed = True
            logger.warning("%s; the next version replaces version %d", error, version)
        except WorkerError as error:
            error.locate(version, "sync")
            raise
        else:
            self._loaded(report)

    def _loaded(self, report: SyncReport) -> None:
        self._missed = False
        digests = dict(islice(report.engines.items(), _MOST_DIGESTS))
        fields = {"version": report.version, "digest": report.digest, "bytes": report.nbytes}
        fields |= {"to_nodes": report.to_nodes, "seconds": round(report.publish_s + report.apply_s, 4)}
        self._recorder.events.record("weights", **fields, loaded=len(report.engines), engines=digests)
        self._served(report.version)

"""Consecutive updates without a finite gradient, counted across restarts of the trainers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.fakes import FakePolicy, fake_spec, policy_group
from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.errors import TrainingDiverged
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.updates import Metrics, Updates
from troupe.workers.contract.messages import RankPlan, UpdateMetrics

ANY = cast("Any", None)
PLAN = RankPlan(((0,),), 1, 1)


class SkippingUpdates(Updates):
    """One update for each entry: whether its gradient was not finite; None: it never ends."""

    def __init__(self) -> None:
        super().__init__(fake_spec(failures={"nonfinite_steps": 3}), Console(io.StringIO()))
        self.skips: Sequence[bool | None] = ()
        self.waits = asyncio.Event()
        self._group = policy_group(FakePolicy())

    @property
    def trainers(self) -> Sequence[TrainerGroup[Any]]:
        return (self._group,)

    async def _run(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        for skipped in self.skips:

            async def update(plans: Sequence[RankPlan], skipped: bool | None = skipped) -> list[UpdateMetrics]:
                if skipped is None:
                    self.waits.set()
                    await asyncio.sleep(1000)
                return [UpdateMetrics({"loss": 0.5, "tokens": 1.0}, {}, skipped=bool(skipped))]

            await self._update(step, self._group, [PLAN], update)
        return [], state

    async def step(self, *skips: bool | None) -> None:
        """A step with these updates."""
        self.skips = skips
        await self.run(0, ANY, ANY)


async def test_a_repeated_step_counts_its_own_updates_alone() -> None:
    updates = SkippingUpdates()
    for skips in ((True,), (False,), (True, True)):
        await updates.step(*skips)
    updates.skips = (True,)  # the first step again, after a restart
    await updates.repeat(0, ANY, ANY)
    with pytest.raises(TrainingDiverged, match="3 consecutive updates"):
        await updates.step(True)


async def test_a_step_that_a_restart_interrupts_is_counted_once() -> None:
    updates = SkippingUpdates()
    interrupted = asyncio.ensure_future(updates.step(True, True, None))
    await updates.waits.wait()
    interrupted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await interrupted
    await updates.step(True, True, False)

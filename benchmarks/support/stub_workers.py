"""Workers of `controller_cost` over Ray: they do as little as they can, with real tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tests.fakes import FakeEngine
from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.messages import GroupRequest, GroupSummary, Unscored
from troupe.workers.reward import RewardWorker


class StubEngine(FakeEngine):
    """An engine that answers after the same time for every group, with a table as an engine makes it."""

    def __init__(self, name: str, seconds: float, tables: Mapping[int, pa.Table]) -> None:
        """`seconds` of every group; its table by the number of its samples."""
        pickle_tables()
        self._tables = tables
        super().__init__(name, lambda _: seconds)

    async def generate(self, request: GroupRequest, prompts: object, finished: Any = None) -> tuple[GroupSummary, Any]:
        """One group."""
        summary, _ = await super().generate(request, prompts, finished)
        table = self._tables[request.samples]
        for name, value in (("prompt_uid", request.prompt_uid), ("attempt", request.attempt)):
            column = table.schema.get_field_index(name)
            field = table.schema.field(column)
            table = table.set_column(column, field, pa.array([value] * request.samples, field.type))
        return summary, table


class StubReward(RewardWorker):
    """The product's reward worker; writes nothing, because the tables of the simulated policy are none."""

    def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: object) -> int:
        """Write nothing."""
        return 0

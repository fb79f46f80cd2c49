"""Groups of which some samples are finished: what an engine reports of them, and how a group continues from them."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from tests.workers.data.test_kept_groups import rollouts
from troupe.workers.contract.messages import GroupRequest, SampleSummary
from troupe.workers.engine.rows import RunningGroup, merged


def summary(index: int) -> SampleSummary:
    return SampleSummary(index, 2, 3, "stop", 3, 3)


def rows(uid: str, *indices: int, attempt: int = 0) -> list[dict[str, Any]]:
    table = rollouts(uid, attempt, samples=max(indices, default=0) + 1)
    return [row for row in table.to_pylist() if row["sample_index"] in indices]


def request(attempt: int, *finished: int) -> GroupRequest:
    return GroupRequest("a", 5, attempt, 4, 1, finished=tuple(map(summary, finished)))


def test_only_the_samples_that_are_not_finished_are_missing() -> None:
    assert request(0).missing == [0, 1, 2, 3]
    assert request(0, 1, 3).missing == [0, 2]
    assert request(0, 0, 1, 2, 3).missing == []


def test_a_group_continues_in_order_of_samples_and_segments_under_its_new_attempt() -> None:
    """Among the rows of another group, and of samples that the request does not name."""
    earlier = rollouts("b", samples=4), rollouts("a", attempt=1, samples=4)
    whole = merged(request(2, 1, 3), pa.concat_tables(earlier), rows("a", 0, 2, attempt=2))
    keys = zip(
        whole["prompt_uid"].to_pylist(), whole["sample_index"].to_pylist(), whole["segment"].to_pylist(), strict=True
    )
    assert list(keys) == [("a", index, segment) for index in range(4) for segment in range(2)]
    assert set(whole["attempt"].to_pylist()) == {2}


def test_finished_samples_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a: no rows of the finished samples \[3\]"):
        merged(request(0, 1, 3), rollouts("a", samples=2), [])


async def test_samples_that_run_failed_or_were_cancelled_are_not_finished() -> None:
    async def sample(index: int) -> int:
        if index == 1:
            raise RuntimeError("failed")
        if index >= 2:
            await asyncio.sleep(60)
        return index

    tasks = {index: asyncio.create_task(sample(index)) for index in (0, 1, 2)}
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    tasks[4] = asyncio.create_task(sample(4))
    group = RunningGroup(
        request(1, 3), tasks, lambda i, _: ([summary(i)], rows("a", i, attempt=1)), rollouts("a", samples=4)
    )
    found, table = group.finished()
    assert [one.sample_index for one in found.samples] == [3, 0]
    assert (found.prompt_uid, found.attempt) == ("a", 1)
    assert table["sample_index"].to_pylist() == [0, 0, 3, 3] and set(table["attempt"].to_pylist()) == {1}
    tasks[4].cancel()

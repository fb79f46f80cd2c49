"""Concurrent calls to many workers."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from tests.fakes import FakePolicy, FakeTable, FaultyWorker
from troupe.orchestrator.cluster.worker_group import PolicyGroup, gather_all
from troupe.workers.contract.messages import RankPlan


async def test_gather_all_yields_to_other_tasks_and_raises_the_first_error() -> None:
    started: list[int] = []
    seen: list[int] = []

    async def call(number: int) -> int:
        started.append(number)
        await asyncio.sleep(0)
        if number == 3:
            raise ValueError("three")
        return number

    async def observe() -> None:
        while True:
            seen.append(len(started))
            await asyncio.sleep(0)

    observer = asyncio.create_task(observe())
    assert await gather_all(call(number) for number in range(100, 300)) == list(range(100, 300))
    assert max(after - before for before, after in itertools.pairwise(seen)) < 50
    with pytest.raises(ValueError, match="three"):
        await gather_all(call(number) for number in range(200))
    observer.cancel()
    assert await gather_all(call(number) for number in (7,)) == [7] and await gather_all([]) == []


async def test_ranks_that_share_their_rows_get_the_same_plan_and_report_once() -> None:
    ranks = [FakePolicy(rank) for rank in range(4)]
    workers = [FaultyWorker(f"policy-{policy.rank}", policy) for policy in ranks]
    group = PolicyGroup("policy", workers, 256, sequence_parallel_size=2)
    await group.start(1.0)
    assert (group.ranks, group.data_parallel_size) == (4, 2)
    plans = [RankPlan(((share,),), 8, 2, trace=f"trace-{share}") for share in range(2)]
    batch = FakeTable("train", ("g",))
    assert len(await group.update(plans, batch, timeout_s=1.0)) == 2
    first, second = plans
    wanted = [first, replace(first, trace=""), second, replace(second, trace="")]
    assert [policy.updates for policy in ranks] == [[plan] for plan in wanted]
    assert len(await group.compute_logprobs(plans, batch, timeout_s=1.0)) == 2
    assert len(await group.token_records(timeout_s=1.0)) == 2
    await group.hold_distributions(plans, batch, 3, False, timeout_s=1.0)
    assert [plan.micro_batches for policy in ranks for plan, _ in policy.held] == [((0,),), ((0,),), ((1,),), ((1,),)]
    with pytest.raises(ValueError):
        await group.update([first], batch, timeout_s=1.0)

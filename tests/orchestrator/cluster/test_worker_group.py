"""Concurrent calls to many workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes import FakePolicy, FakeTable, FaultyWorker
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.errors import WorkerTimeout
from troupe.workers.contract.messages import PrepareRequest, RankPlan


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
    await group.store_distributions(plans, batch, 3, False, timeout_s=1.0)
    assert [plan.micro_batches for policy in ranks for plan, _ in policy.held] == [((0,),), ((0,),), ((1,),), ((1,),)]
    with pytest.raises(ValueError):
        await group.update([first], batch, timeout_s=1.0)


COMPUTING: dict[str, Callable[[PolicyGroup], Coroutine[Any, Any, Any]]] = {
    "update": lambda group: group.update([RankPlan(((0,),), 8, 2)], FakeTable("train", ("g",)), timeout_s=30.0),
    "prepare": lambda group: group.prepare(PrepareRequest(()), timeout_s=30.0),
    "digest": lambda group: group.digest(timeout_s=30.0),
    "divergence": lambda group: group.divergence(timeout_s=30.0),
    "discard_stored": lambda group: group.discard_stored(timeout_s=30.0),
    "token_records": lambda group: group.token_records(timeout_s=30.0),
    "publish_weights": lambda group: group.publish_weights(1, timeout_s=30.0),
}


@pytest.mark.parametrize("method", COMPUTING)
async def test_a_call_that_hangs_is_bounded_by_those_before(method: str) -> None:
    worker = FaultyWorker("policy-0", FakePolicy(0))
    group = PolicyGroup("policy", [worker], 256, hung_s=0.05)
    await group.start(1.0)
    for _ in range(5):
        await COMPUTING[method](group)
    worker.frozen = True
    with pytest.raises(WorkerTimeout, match=rf"policy-0.*{method}.*failures\.hung_s"):
        await COMPUTING[method](group)


async def test_a_call_that_writes_files_has_its_timeout_because_disks_stall() -> None:
    worker = FaultyWorker("policy-0", FakePolicy(0))
    group = PolicyGroup("policy", [worker], 256, hung_s=0.01)
    await group.start(1.0)
    for _ in range(5):
        await group.try_save("/tmp", timeout_s=1.0)
    worker.frozen = True
    with pytest.raises(WorkerTimeout, match=r"no answer in 0\.4 s$"):
        await group.try_save("/tmp", timeout_s=0.4)

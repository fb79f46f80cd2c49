"""Runs of controller_limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.controller_limits import FILL, MEMORY, P99, Delays, LimitsRun, Opened, Sampling, Work, parse
from troupe.workers.contract.messages import GroupRequest, WorkerGone

WORK = Work(engines=20, slots=3, samples=2, groups=16, steps=2, groups_per_s=400.0, fault_every=20, probe_every_s=0.05)


def test_all_slots_are_full_and_lost_engines_are_accounted_for() -> None:
    turn = LimitsRun(WORK, seed=1).run()
    assert WORK.open_groups <= turn.figures["samples in flight"] / WORK.samples
    assert turn.figures["engines that died"] > 0 and turn.amount == WORK.steps * WORK.groups
    assert all(turn.figures[name] >= 0 for name in (MEMORY, FILL, P99))


def test_groups_end_evenly_from_the_start_and_only_later_ones_kill() -> None:
    work = replace(WORK, fault_every=1)
    sampling = Sampling(work, seed=1)
    request = GroupRequest(prompt_uid="e0-r1", row=1, attempt=0, samples=2, seed=3, max_tokens=8)
    mean_s = work.open_groups / work.groups_per_s
    assert all(0.0 <= sampling.seconds(request) <= mean_s for _ in range(work.open_groups))
    with pytest.raises(WorkerGone):
        sampling.seconds(request)
    assert sampling.died == 1


def test_a_blocked_event_loop_is_noticed() -> None:
    async def run() -> Delays:
        delays = Delays()
        watcher = asyncio.create_task(delays.watch())
        await asyncio.sleep(0.01)
        sum(range(3_000_000))  # does not yield
        await asyncio.sleep(0.01)
        watcher.cancel()
        return delays

    delays = asyncio.run(run())
    assert max(delays.wall_s) > 0.0 and max(delays.cpu_s) > 0.0
    delays.clear()
    assert not delays.wall_s and not delays.cpu_s


def test_the_moment_is_noted_when_all_groups_are_open() -> None:
    opened = Opened(2)
    opened.drawn(None)
    assert opened.at == 0.0
    opened.drawn(None)
    first = opened.at
    opened.drawn(None)
    assert opened.at == first > 0.0


def test_a_million_samples_are_in_flight_by_default() -> None:
    given = parse([])
    assert max(given.engines) * given.slots * given.samples == 1_024_000

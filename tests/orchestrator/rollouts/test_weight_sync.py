"""Weight sync against fakes: verification, replacement of engines, and several nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes import FakePolicy, FaultyEngine, FaultyWorker, fake_pool, policy_group, pool_spec
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import EnginesLost, UpdateDamaged, WeightsNotVerified, WorkerError, WorkerTimeout
from troupe.orchestrator.pools.engines import Engine, EnginePool
from troupe.orchestrator.rollouts.weight_sync import DeviceSync, FileSync
from troupe.workers.contract import roles
from troupe.workers.contract.messages import WeightAck, WeightUpdate


def test_two_engines_receive_the_same_version() -> None:
    """Both engines acknowledge version and digest."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> None:
        sync = FileSync(policy_group(FakePolicy(0), FakePolicy(1)), fake_pool(engines), 1.0)
        report = await sync.push(3)
        assert (report.version, report.digest, report.nbytes) == (3, "d3", 100)
        assert report.engines == {"rollout-0": "d3", "rollout-1": "d3"}

    asyncio.run(run())
    assert {(e.version, e.digest) for e in engines} == {(3, "d3")}


def test_digest_mismatch_stops_the_run_and_names_the_engine() -> None:
    """The run must not train on samples of an unknown policy."""
    engines = [FaultyEngine("rollout-0", random.Random(0)), FaultyEngine("rollout-1", random.Random(1))]
    engines[1].lie_about_digest = True

    async def run() -> None:
        await FileSync(policy_group(FakePolicy()), fake_pool(engines), 1.0).push(1)

    with pytest.raises(WeightsNotVerified, match=r"rollout-1 acknowledged version 1 digest other; .* digest d1"):
        asyncio.run(run())


class DamagedOnTheWay(FaultyEngine):
    """Does not receive the first updates as they were published."""

    damaged = 1

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        await asyncio.sleep(0.01)
        if self.damaged:
            self.damaged -= 1
            raise UpdateDamaged(self.name, "update_weights", "weights have digest other, the published digest is d3")
        return await super().update_weights(update)


def test_weights_that_were_damaged_on_their_way_are_published_again() -> None:
    engines = [FaultyEngine("rollout-0", random.Random(0)), DamagedOnTheWay("rollout-1", random.Random(1))]
    policy = FakePolicy()

    async def run() -> None:
        sync = FileSync(policy_group(policy), fake_pool(engines), 1.0)
        assert (await sync.push(3)).version == 3
        engines[1].damaged = 2
        with pytest.raises(UpdateDamaged, match="rollout-1"):
            await sync.push(4)

    asyncio.run(run())
    assert {(e.version, e.digest) for e in engines} == {(3, "d3"), (4, "d4")}


def test_an_engine_that_dies_during_the_sync_is_replaced_with_the_current_weights() -> None:
    """The new engine receives the weights before it serves."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> list[Engine]:
        pool = fake_pool(engines)
        sync = FileSync(policy_group(FakePolicy()), pool, 1.0)
        pool.engines[0].handle.kill()
        await sync.push(1)
        await asyncio.sleep(0.05)
        return pool.engines

    after = asyncio.run(run())
    assert [engine.version for engine in after] == [1, 1]


def test_losing_the_last_engine_during_the_sync_raises_engines_lost() -> None:
    """No engine and no restart is left."""

    async def run() -> None:
        pool = fake_pool([FaultyEngine("rollout-0", random.Random(0))], pool_spec(restarts=0))
        pool.engines[0].handle.kill()
        await FileSync(policy_group(FakePolicy()), pool, 1.0).push(1)

    with pytest.raises(EnginesLost):
        asyncio.run(run())


class _Publisher(FakePolicy):
    reads = 0

    async def read_weights(self, update: WeightUpdate) -> tuple[int, str]:
        self.reads += 1
        return update.nbytes, "payload"


class _RemoteEngine(FaultyEngine):
    def __init__(self, name: str, rng: random.Random) -> None:
        super().__init__(name, rng)
        self.written: list[object] = []

    async def write_weights(self, update: WeightUpdate, payload: object) -> None:
        self.written.append(payload)


def test_weights_are_sent_to_each_node_once() -> None:
    """Of two engines on one remote node, one writes the file for both."""
    engines = [_RemoteEngine(f"rollout-{i}", random.Random(i)) for i in range(4)]
    publisher = _Publisher()

    async def run() -> None:
        pool = fake_pool([])
        hosts = ("host", "far", "far", "further")
        pool.workers = [Engine(FaultyWorker(e.name, e), h) for e, h in zip(engines, hosts, strict=True)]
        await FileSync(policy_group(publisher), pool, 1.0).push(1)

    asyncio.run(run())
    assert publisher.reads == 1
    assert [len(e.written) for e in engines] == [0, 1, 0, 1]
    assert {e.version for e in engines} == {1}


class _Link:
    """The link that the policy sends weights over, to fake engines."""

    def __init__(self, engines: list[FaultyEngine]) -> None:
        self.engines = engines
        self.processes = len(engines)
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Do nothing."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Set the version of all engines except those with `lie_about_digest`."""
        for engine in self.engines:
            if not engine.lie_about_digest:
                engine.version = int(weight_version or "0")


class _Sender(FakePolicy):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[roles.EngineLink] = []
        self.fails = False

    async def connect_engines(self, link: roles.EngineLink) -> None:
        self.links.append(link)

    async def send_weights(self, version: int) -> int:
        if self.fails:
            raise WorkerTimeout("policy-0", "send_weights", "no answer in time")
        self.links[-1].finish_weight_update(str(version))
        return 100


def _device_sync(engines: list[FaultyEngine]) -> tuple[_Sender, EnginePool, DeviceSync]:
    sender, pool = _Sender(), fake_pool(engines)

    def link(handles: Sequence[WorkerHandle[roles.RolloutEngine]]) -> _Link:
        return _Link([handle.target for handle in handles if isinstance(handle, FaultyWorker)])

    return sender, pool, DeviceSync(policy_group(sender), pool, link, 1.0)


def test_device_transfer_connects_once_and_again_when_engines_change() -> None:
    """Two pushes use one link. A new engine is connected and has the current version before it serves."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> tuple[int, list[int]]:
        sender, pool, sync = _device_sync(engines)
        await sync.push(1)
        await sync.push(2)
        assert len(sender.links) == 1
        new = Engine(FaultyWorker("rollout-2", FaultyEngine("rollout-2", random.Random(2))), "host")
        await sync.bring_up(new)
        pool.engines.append(new)
        await sync.push(3)
        return len(sender.links), [engine.version for engine in pool.engines]

    assert asyncio.run(run()) == (2, [3, 3, 3])


def test_an_engine_with_another_version_after_a_device_transfer_stops_the_run() -> None:
    """The check uses the acknowledgement of the engine, not that of the sender."""
    engines = [FaultyEngine("rollout-0", random.Random(0), lie_about_digest=True)]

    async def run() -> None:
        await _device_sync(engines)[2].push(1)

    with pytest.raises(WeightsNotVerified, match="rollout-0 serves version 0, sent was 1"):
        asyncio.run(run())


def test_a_failed_device_transfer_connects_the_engines_again() -> None:
    """The link of a transfer that failed is not used again: its communicator may be half way through a broadcast."""

    async def run() -> int:
        sender, _, sync = _device_sync([FaultyEngine("rollout-0", random.Random(0))])
        await sync.push(1)
        sender.fails = True
        with pytest.raises(WorkerError):
            await sync.push(2)
        sender.fails = False
        assert (await sync.push(3)).version == 3
        return len(sender.links)

    assert asyncio.run(run()) == 2

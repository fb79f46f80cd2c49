"""Weight sync against fakes: verification, replacement, several nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from orchestrator.engine_pool import Engine, EnginePool
from orchestrator.errors import EnginesLost, WeightsNotVerified
from orchestrator.handles import WorkerHandle
from orchestrator.weight_sync import DeviceSync, FileSync
from tests.fakes import BOUNDS, FakeEngine, FakeHandle, FakePolicy, fake_pool, gang
from workers.messages import WeightUpdate


def test_two_engines_end_on_the_same_version() -> None:
    """Both acknowledge version and digest."""
    engines = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> None:
        sync = FileSync(gang(FakePolicy(0), FakePolicy(1)), fake_pool(engines), 1.0)
        report = await sync.push(3)
        assert (report.version, report.engines, report.nbytes) == (3, 2, 100)

    asyncio.run(run())
    assert {(e.version, e.digest) for e in engines} == {(3, "d3")}


def test_digest_mismatch_stops_the_run_and_names_the_engine() -> None:
    """Samples of an unknown policy are worse than none."""
    engines = [FakeEngine("rollout-0", random.Random(0)), FakeEngine("rollout-1", random.Random(1))]
    engines[1].lie_about_digest = True

    async def run() -> None:
        await FileSync(gang(FakePolicy()), fake_pool(engines), 1.0).push(1)

    with pytest.raises(WeightsNotVerified, match=r"rollout-1 acknowledged version 1 digest other, .* digest d1"):
        asyncio.run(run())


def test_engine_that_dies_during_the_sync_is_replaced_with_the_current_weights() -> None:
    """The fresh engine takes the weights before it serves."""
    engines = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> list[Engine]:
        pool = fake_pool(engines)
        sync = FileSync(gang(FakePolicy()), pool, 1.0)
        pool.engines[0].handle.kill()
        await sync.push(1)
        await asyncio.sleep(0.05)
        return pool.engines

    after = asyncio.run(run())
    assert [engine.version for engine in after] == [1, 1]


def test_last_engine_lost_during_the_sync() -> None:
    """No engine and no restart: a typed error."""

    async def run() -> None:
        bounds = replace(BOUNDS, restarts=0)
        pool = fake_pool([FakeEngine("rollout-0", random.Random(0))], bounds)
        pool.engines[0].handle.kill()
        await FileSync(gang(FakePolicy()), pool, 1.0).push(1)

    with pytest.raises(EnginesLost):
        asyncio.run(run())


@dataclass
class _Publisher(FakePolicy):
    reads: int = 0

    async def read_weights(self, update: WeightUpdate) -> tuple[int, str]:
        self.reads += 1
        return update.nbytes, "payload"


@dataclass
class _RemoteEngine(FakeEngine):
    written: list[object] = field(default_factory=list)

    async def write_weights(self, update: WeightUpdate, payload: object) -> None:
        self.written.append(payload)


def test_weights_cross_to_each_node_once() -> None:
    """Two engines on another node: one of them writes the node's copy."""
    engines = [_RemoteEngine(f"rollout-{i}", random.Random(i)) for i in range(4)]
    publisher = _Publisher()

    async def run() -> None:
        pool = fake_pool([])
        hosts = ("host", "far", "far", "further")
        pool.engines = [Engine(FakeHandle(e.name, e), h) for e, h in zip(engines, hosts, strict=True)]
        await FileSync(gang(publisher), pool, 1.0).push(1)

    asyncio.run(run())
    assert publisher.reads == 1
    assert [len(e.written) for e in engines] == [0, 1, 0, 1]
    assert {e.version for e in engines} == {1}


class _Link:
    """Drives fake engines as the trainer's sender would."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.engines = engines

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """Nothing to join."""

    def start_weight_update(self) -> None:
        """Nothing to freeze."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Nothing to receive."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All engines but those that lie take the version."""
        for engine in self.engines:
            if not engine.lie_about_digest:
                engine.version = int(weight_version or "0")


@dataclass
class _Sender(FakePolicy):
    links: list[_Link] = field(default_factory=list)

    async def connect_engines(self, link: _Link) -> None:
        self.links.append(link)

    async def send_weights(self, version: int) -> int:
        self.links[-1].finish_weight_update(str(version))
        return 100


def _device_sync(engines: list[FakeEngine]) -> tuple[_Sender, EnginePool, DeviceSync]:
    sender, pool = _Sender(), fake_pool(engines)

    def link(handles: Sequence[WorkerHandle]) -> _Link:
        return _Link([handle.target for handle in handles if isinstance(handle, FakeHandle)])

    return sender, pool, DeviceSync(gang(sender), pool, link, 1.0)


def test_device_transfer_joins_once_and_again_when_engines_change() -> None:
    """Two pushes over one link; a fresh engine is joined, with the current version, before it serves."""
    engines = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> tuple[int, list[int]]:
        sender, pool, sync = _device_sync(engines)
        await sync.push(1)
        await sync.push(2)
        assert len(sender.links) == 1
        fresh = Engine(FakeHandle("rollout-2", FakeEngine("rollout-2", random.Random(2))), "host")
        await sync.bring_up(fresh)
        pool.engines.append(fresh)
        await sync.push(3)
        return len(sender.links), [engine.version for engine in pool.engines]

    assert asyncio.run(run()) == (2, [3, 3, 3])


def test_engine_that_serves_another_version_after_a_device_transfer_stops_the_run() -> None:
    """The engine's own word is asked for, not the sender's."""
    engines = [FakeEngine("rollout-0", random.Random(0), lie_about_digest=True)]

    async def run() -> None:
        await _device_sync(engines)[2].push(1)

    with pytest.raises(WeightsNotVerified, match="rollout-0 serves version 0, sent was 1"):
        asyncio.run(run())

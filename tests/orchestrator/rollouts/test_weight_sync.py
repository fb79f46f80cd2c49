"""Weight sync against fakes: verification, replacement of engines, and several nodes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.clock import on_virtual_time
from tests.fakes import (
    FakeEngine,
    FakePolicy,
    FaultyEngine,
    FaultyWorker,
    LocalWorker,
    fake_pool,
    fakes_of,
    policy_group,
    pool_spec,
)
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import (
    EnginesLost,
    UpdateDamaged,
    WeightsNotVerified,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.rollouts.weight_sync import DeviceSync, FileSync, SyncReport
from troupe.workers.contract import roles
from troupe.workers.contract.messages import WeightAck, WeightsSent, WeightUpdate


def test_two_engines_receive_the_same_version() -> None:
    """Both engines acknowledge version and digest."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> None:
        sync = FileSync(policy_group(FakePolicy(0), FakePolicy(1)), fake_pool(engines), 1.0)
        report = await sync.push(3)
        assert (report.version, report.digest, report.nbytes) == (3, "d3", 100)
        assert report.engines == {"rollout-0": "d3", "rollout-1": "d3"}

    on_virtual_time(run())
    assert {(e.version, e.digest) for e in engines} == {(3, "d3")}


def test_digest_mismatch_stops_the_run_and_names_the_engine() -> None:
    """The run must not train on samples of an unknown policy."""
    engines = [FaultyEngine("rollout-0", random.Random(0)), FaultyEngine("rollout-1", random.Random(1))]
    engines[1].lie_about_digest = True

    async def run() -> None:
        await FileSync(policy_group(FakePolicy()), fake_pool(engines), 1.0).push(1)

    with pytest.raises(WeightsNotVerified, match=r"rollout-1 acknowledged version 1 digest other; .* digest d1"):
        on_virtual_time(run())


class OneVersionBehind(FaultyEngine):
    """Acknowledges the right digest under the version before."""

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        return replace(await super().update_weights(update), version=update.version - 1)


def test_another_version_with_the_same_digest_stops_the_run_and_so_does_a_new_engine_s() -> None:
    async def run(old: FaultyEngine, new: FaultyEngine) -> None:
        sync = FileSync(policy_group(FakePolicy()), fake_pool([old]), 1.0)
        await sync.push(1)
        await sync.bring_up(Engine(FaultyWorker(new.name, new), "host"))

    engines = OneVersionBehind("rollout-0", random.Random(0)), FaultyEngine("rollout-1", random.Random(1))
    for order in (engines, engines[::-1]):
        with pytest.raises(WeightsNotVerified, match="rollout-0 acknowledged version 0 digest d1; sent was version 1"):
            on_virtual_time(run(*order))


def test_an_engine_that_answers_but_did_not_load_the_version_stops_the_run() -> None:
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]
    engines[1].load_s = 5.0

    async def run() -> None:
        await FileSync(policy_group(FakePolicy()), fake_pool(engines), 1.0).push(1)

    with pytest.raises(WeightsNotVerified, match=r"rollout-1 did not load version 1: .*no answer in 1 s"):
        on_virtual_time(run())


def test_thousands_of_updates_are_submitted_in_portions_between_which_other_tasks_run() -> None:
    """Submitted at once, those to 100 000 engines blocked the event loop for two seconds."""
    turns: list[int] = []

    class Counted(FakeEngine):
        async def update_weights(self, update: WeightUpdate) -> WeightAck:
            turns.append(turn)
            return await super().update_weights(update)

    turn = 0

    async def others() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def run() -> None:
        engines = [Engine(LocalWorker(f"rollout-{i}", Counted(f"rollout-{i}")), "host") for i in range(2000)]
        pool = EnginePool(engines, no_spawn, pool_spec(), PoolWeights())
        beside = asyncio.create_task(others())
        report = await FileSync(policy_group(FakePolicy()), pool, 60.0).push(1)
        beside.cancel()
        assert len(report.engines) == 2000 == len(turns)

    asyncio.run(run())
    assert max(Counter(turns).values()) <= 64


async def no_spawn(name: str) -> Engine:
    """Never called: no engine is lost."""
    raise AssertionError(name)


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

    on_virtual_time(run())
    assert {(e.version, e.digest) for e in engines} == {(3, "d3"), (4, "d4")}


def test_an_engine_that_dies_during_the_sync_is_replaced_with_the_current_weights() -> None:
    """The new engine receives the weights before it serves."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> list[Engine]:
        pool = fake_pool(engines, weights=PoolWeights(lambda engine: sync.bring_up(engine)))
        sync = FileSync(policy_group(FakePolicy()), pool, 1.0)
        pool.workers[0].handle.kill()
        await sync.push(1)
        await asyncio.sleep(0.05)
        return pool.workers

    after = on_virtual_time(run())
    assert [engine.version for engine in after] == [1, 1]


def test_an_engine_whose_other_calls_fail_as_it_dies_during_the_sync_is_replaced() -> None:
    """Whichever call fails first makes the pool probe it, which takes a moment."""

    class Probed(FaultyWorker[FaultyEngine]):
        async def call(self, method: Any, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.1 if method.__name__ == "health" else 0.0)
            return await super().call(method, timeout_s, *args, **kwargs)

    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> list[int]:
        pool = fake_pool([], weights=PoolWeights(lambda engine: sync.bring_up(engine)))
        pool.workers.extend(Engine(Probed(e.name, e), "host") for e in engines)
        sync = FileSync(policy_group(FakePolicy()), pool, 1.0)
        dying = pool.workers[0]
        dying.handle.kill()
        await gather_all([pool.report_failure(dying, WorkerDied(dying.name, "generate", "stopped")), sync.push(1)])
        await asyncio.sleep(0.5)
        assert pool.budget.total == 1
        return [engine.version for engine in pool.workers]

    assert on_virtual_time(run()) == [1, 1]


def test_losing_the_last_engine_during_the_sync_raises_engines_lost() -> None:
    """No engine and no restart is left."""

    async def run() -> None:
        pool = fake_pool([FaultyEngine("rollout-0", random.Random(0))], pool_spec(restarts=0))
        pool.workers[0].handle.kill()
        await FileSync(policy_group(FakePolicy()), pool, 1.0).push(1)

    with pytest.raises(EnginesLost):
        on_virtual_time(run())


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

    on_virtual_time(run())
    assert publisher.reads == 1
    assert [len(e.written) for e in engines] == [0, 1, 0, 1]
    assert {e.version for e in engines} == {1}


def test_engines_load_what_is_published_without_the_policy() -> None:
    """Publishing ends when every node has its file: from then on the policy may train."""
    engines = [_RemoteEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]
    policy = policy_group(_Publisher())

    async def run() -> SyncReport:
        pool = fake_pool([])
        pool.workers = [Engine(FaultyWorker(e.name, e), h) for e, h in zip(engines, ("host", "far"), strict=True)]
        sync = FileSync(policy, pool, 1.0)
        await sync.publish(1)
        assert [len(e.written) for e in engines] == [0, 1] and {e.version for e in engines} == {0}
        for rank in fakes_of(policy):
            rank.frozen = True
        report = await sync.load()
        assert report is not None
        return report

    report = on_virtual_time(run())
    assert (report.version, report.engines) == (1, {"rollout-0": "d1", "rollout-1": "d1"})
    assert report.to_nodes == report.nbytes


class _DeltaPublisher(_Publisher):
    """Says which version each difference starts from."""

    delta_bytes = 7

    def __init__(self) -> None:
        super().__init__()
        self.bases: list[str] = []

    async def publish_weights(self, version: int, base: str = "") -> WeightUpdate | None:
        self.bases.append(base)
        return await super().publish_weights(version, base)

    async def read_delta(self, update: WeightUpdate) -> tuple[int, str]:
        return self.delta_bytes, self.bases[-1]


class _KeepingEngine(_RemoteEngine):
    """Keeps the digest of what its file holds, and refuses to load anything else."""

    file = ""
    dies_in = ""

    async def write_weights(self, update: WeightUpdate, payload: object) -> None:
        await self._die("write_weights")
        await super().write_weights(update, payload)
        self.file = update.digest

    async def change_weights(self, update: WeightUpdate, delta: str) -> bool:
        await self._die("change_weights")
        before, self.file = self.file, update.digest
        return before == delta

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        if self.file != update.digest:
            raise UpdateDamaged(self.name, "update_weights", f"weights have digest {self.file}")
        return await super().update_weights(update)

    async def _die(self, method: str) -> None:
        if self.dies_in == method:
            raise WorkerDied(self.name, method, "the process is gone")


def _far(*engines: _KeepingEngine) -> EnginePool:
    """A pool with each engine on a node of its own, none of them the policy's."""
    pool = fake_pool([])
    pool.workers = [Engine(FaultyWorker(e.name, e), f"far-{e.name}") for e in engines]
    return pool


def test_a_node_that_has_the_version_before_gets_what_changed() -> None:
    engine, publisher = _KeepingEngine("rollout-0", random.Random(0)), _DeltaPublisher()

    async def run() -> list[int]:
        sync = FileSync(policy_group(publisher), _far(engine), 1.0, delta=True)
        return [(await sync.push(version)).to_nodes for version in (1, 2, 3)]

    assert on_virtual_time(run()) == [100, 7, 7]
    assert publisher.bases == ["", "d1", "d2"]
    assert (publisher.reads, engine.version, engine.file) == (1, 3, "d3")


@pytest.mark.parametrize(("delta", "nbytes"), [(False, 7), (True, 0)])
def test_all_weights_travel_where_that_is_asked_for_or_cheaper(delta: bool, nbytes: int) -> None:
    engine, publisher = _KeepingEngine("rollout-0", random.Random(0)), _DeltaPublisher()
    publisher.delta_bytes = nbytes

    async def run() -> list[int]:
        sync = FileSync(policy_group(publisher), _far(engine), 1.0, delta=delta)
        return [(await sync.push(version)).to_nodes for version in (1, 2)]

    assert on_virtual_time(run()) == [100, 100]
    assert publisher.bases == ["", "d1" if delta else ""]


def test_a_node_that_lost_the_version_before_and_one_that_joins_get_all_weights() -> None:
    """The others get what changed in the same update."""
    kept, lost, late = (_KeepingEngine(f"rollout-{i}", random.Random(i)) for i in range(3))
    publisher = _DeltaPublisher()

    async def run() -> tuple[int, int]:
        pool = _far(kept, lost)
        sync = FileSync(policy_group(publisher), pool, 1.0, delta=True)
        await sync.push(1)
        lost.file = ""
        second = (await sync.push(2)).to_nodes
        joined = Engine(FaultyWorker(late.name, late), "far-late")
        await sync.bring_up(joined)
        pool.workers.append(joined)
        return second, (await sync.push(3)).to_nodes

    assert on_virtual_time(run()) == (7 + 7 + 100, 3 * 7)
    assert [len(e.written) for e in (kept, lost, late)] == [1, 2, 1]
    assert {e.version for e in (kept, lost, late)} == {3}


def test_a_difference_that_gives_other_weights_is_found_and_all_weights_are_published() -> None:
    """The engine verifies what it made of the version before, and its file is written anew."""

    class WrongBase(_KeepingEngine):
        async def change_weights(self, update: WeightUpdate, delta: str) -> bool:
            self.file = "neither"
            return True

    engine, publisher = WrongBase("rollout-0", random.Random(0)), _DeltaPublisher()

    async def run() -> int:
        sync = FileSync(policy_group(publisher), _far(engine), 1.0, delta=True)
        await sync.push(1)
        return (await sync.push(2)).to_nodes

    assert on_virtual_time(run()) == 107
    assert publisher.bases == ["", "d1", ""]
    assert (engine.version, engine.file) == (2, "d2")


@pytest.mark.parametrize("method", ["write_weights", "change_weights"])
def test_an_engine_that_dies_while_it_writes_for_its_node_is_replaced_by_another_of_the_node(method: str) -> None:
    """The run goes on: the next engine of the node writes all weights."""
    first, second = (_KeepingEngine(f"rollout-{i}", random.Random(i)) for i in range(2))

    async def run() -> list[str]:
        pool = fake_pool([])
        pool.workers = [Engine(FaultyWorker(e.name, e), "far") for e in (first, second)]
        sync = FileSync(policy_group(_DeltaPublisher()), pool, 1.0, delta=True)
        if method == "change_weights":
            second.file = "d1"  # both read the node's file
            await sync.push(1)
        first.dies_in = method
        dead = pool.workers[0]
        dead.handle.kill()
        await sync.push(2)
        return [engine.name for engine in pool.workers if engine is not dead]

    names = on_virtual_time(run())
    assert "rollout-1" in names
    assert (second.version, second.file, second.written) == (2, "d2", ["payload"])


def test_a_policy_that_dies_before_it_sent_what_changed_has_the_update_repeated() -> None:
    class Dying(_DeltaPublisher):
        async def read_delta(self, update: WeightUpdate) -> tuple[int, str]:
            raise WorkerDied("policy-0", "read_delta", "the process is gone")

    engine = _KeepingEngine("rollout-0", random.Random(0))

    async def run() -> int:
        sync = FileSync(policy_group(Dying()), _far(engine), 1.0, delta=True)
        await sync.push(1)
        return (await sync.push(2)).to_nodes

    assert on_virtual_time(run()) == 100
    assert engine.version == 2


class _Link:
    """The link that the policy sends weights over, to fake engines."""

    def __init__(self, engines: list[FaultyEngine]) -> None:
        self.engines = engines
        self.processes = len(engines)

    def join(self, info: dict[str, Any]) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing."""

    def receive(self, info: dict[str, Any]) -> None:
        """Do nothing."""

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        """Set the version of all engines; those with `lie_about_digest` acknowledge another digest."""
        for engine in self.engines:
            engine.version = version
        return [WeightAck(e.name, version, "other" if e.lie_about_digest else digest, 0.0) for e in self.engines]


class _Sender(FakePolicy):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[roles.EngineLink] = []
        self.failures: list[WorkerError] = []
        self.trained = ""

    async def connect_engines(self, link: roles.EngineLink) -> None:
        self.links.append(link)

    async def send_weights(self, version: int) -> WeightsSent:
        if self.failures:
            raise self.failures.pop(0)
        digest = f"d{version}{self.trained}"
        return WeightsSent(version, digest, 100, tuple(self.links[-1].finish(version, digest)))


def _device_sync(engines: list[FaultyEngine]) -> tuple[_Sender, EnginePool, DeviceSync]:
    sender = _Sender()
    weights = PoolWeights(lambda engine: sync.bring_up(engine), lambda: sync.renew())
    pool = fake_pool(engines, weights=weights)

    def link(handles: Sequence[WorkerHandle[roles.RolloutEngine]]) -> _Link:
        return _Link([handle.target for handle in handles if isinstance(handle, FaultyWorker)])

    sync = DeviceSync(policy_group(sender), pool, link, 1.0)
    return sender, pool, sync


def _engine_failed() -> WorkerError:
    return WorkerRaised("policy-0", "send_weights", "rollout-0: a broadcast failed")


def test_device_transfer_connects_once_and_again_when_engines_change() -> None:
    """Two pushes use one link. A new engine alone receives the current version before it serves."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> tuple[list[int], list[int]]:
        sender, pool, sync = _device_sync(engines)
        await sync.push(1)
        report = await sync.push(2)
        assert (report.digest, report.engines) == ("d2", {"rollout-0": "d2", "rollout-1": "d2"})
        assert len(sender.links) == 1
        new = Engine(FaultyWorker("rollout-2", FaultyEngine("rollout-2", random.Random(2))), "host")
        await sync.bring_up(new)
        pool.workers.append(new)
        await sync.push(3)
        return [link.processes for link in sender.links], [engine.version for engine in pool.workers]

    assert on_virtual_time(run()) == ([2, 1, 3], [3, 3, 3])


def test_publishing_from_device_to_device_waits_for_the_engines() -> None:
    """The trainers send from the memory that their next update writes."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> None:
        sync = _device_sync(engines)[2]
        await sync.publish(1)
        assert {engine.version for engine in engines} == {1}
        report = await sync.load()
        assert report is not None and report.engines == {"rollout-0": "d1", "rollout-1": "d1"}

    on_virtual_time(run())


def test_another_digest_after_a_device_transfer_stops_the_run() -> None:
    engines = [FaultyEngine("rollout-0", random.Random(0), lie_about_digest=True)]

    async def run() -> None:
        await _device_sync(engines)[2].push(1)

    with pytest.raises(WeightsNotVerified, match=r"rollout-0 acknowledged version 1 digest other; .* digest d1"):
        on_virtual_time(run())


def test_a_failed_device_transfer_is_repeated_over_new_connections() -> None:
    """The link of a transfer that failed is not used again: its communicator may be half way through a broadcast."""

    async def run() -> int:
        sender, _, sync = _device_sync([FaultyEngine("rollout-0", random.Random(0))])
        await sync.push(1)
        sender.failures = [_engine_failed()]
        assert (await sync.push(2)).version == 2
        sender.failures = [_engine_failed(), _engine_failed()]
        with pytest.raises(WorkerRaised):
            await sync.push(3)
        return len(sender.links)

    assert on_virtual_time(run()) == 3


def test_an_engine_that_dies_in_a_device_transfer_is_replaced_and_the_others_receive_the_version() -> None:
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> list[int]:
        sender, pool, sync = _device_sync(engines)
        pool.workers[0].kill()
        sender.failures = [_engine_failed()]
        assert set((await sync.push(1)).engines) == {"rollout-1"}
        await asyncio.sleep(0.05)
        return [engine.version for engine in pool.workers]

    assert on_virtual_time(run()) == [1, 1]


def test_a_lost_trainer_is_for_the_trainers_recovery_to_repeat() -> None:
    async def run() -> int:
        sender, _, sync = _device_sync([FaultyEngine("rollout-0", random.Random(0))])
        sender.failures = [WorkerTimeout("policy-0", "send_weights", "no answer in time")]
        with pytest.raises(WorkerTimeout):
            await sync.push(1)
        return len(sender.links)

    assert on_virtual_time(run()) == 1


def test_a_new_engine_does_not_serve_weights_that_have_trained_since_under_the_version_before() -> None:
    """The trainer has only its current weights: in the middle of a step, the engine waits for the next version."""

    async def run() -> None:
        sender, _, sync = _device_sync([FaultyEngine("rollout-0", random.Random(0))])
        await sync.push(1)
        sender.trained = ", after an update"
        new = Engine(FaultyWorker("rollout-1", FaultyEngine("rollout-1", random.Random(1))), "host")
        with pytest.raises(UpdateDamaged, match=r"rollout-1\.bring_up: the policy has trained since version 1"):
            await sync.bring_up(new)
        waiting = asyncio.create_task(sync.renew())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await sync.push(2)
        await waiting
        await sync.bring_up(new)
        assert new.version == 2

    on_virtual_time(run())


def test_an_engine_that_is_let_go_gets_weights_without_samples_and_not_those_of_half_a_step() -> None:
    """It evaluated version 1. Its samples end; the policy has trained since version 2, so it waits for version 3."""
    engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]

    async def run() -> list[int]:
        sender, pool, sync = _device_sync(engines)
        await sync.push(1)
        held = pool.hold()
        assert held is not None and pool.hold() is None
        assert set((await sync.push(2)).engines) == {engine.name for engine in pool.workers} - {held.name}
        sender.trained = ", after an update"
        held.outstanding = 1
        pool.end_hold(held)
        await asyncio.sleep(0.01)
        assert held.version == 1 and held.held
        pool.release(held, 1)
        await asyncio.sleep(0.01)
        assert held.held and held in pool.workers
        assert (await pool.acquire(1)) is not held
        sender.trained = ""
        await sync.push(3)
        await asyncio.sleep(0.01)
        assert not held.held and (await pool.acquire(1)) is held
        await sync.push(4)
        assert {engine.version for engine in pool.workers} == {4}
        return [link.processes for link in sender.links]

    assert on_virtual_time(run()) == [2, 1, 1, 1, 1, 2]

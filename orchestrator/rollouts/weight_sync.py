"""Weight synchronisation: publishes the policy's weights once, loads them into every engine, verifies every engine.

The pool replaces an engine that cannot be reached. An engine that acknowledges another version or digest than was sent
ends the run, because samples of an unknown policy are worse than none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import Link, PolicyGroup
from troupe.orchestrator.errors import (
    EnginesLost,
    UpdateDamaged,
    WeightsNotVerified,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.replicas import Changes
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import WeightAck, WeightsSent, WeightUpdate
from troupe.workers.contract.roles import RolloutEngine, TableRef
from troupe.workers.contract.weight_backends import BACKENDS

if TYPE_CHECKING:
    from troupe.orchestrator.cluster.ray_cluster import Cluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """Times (seconds) and size (bytes) of one synchronisation."""

    version: int
    publish_s: float
    apply_s: float
    nbytes: int
    engines: Mapping[str, str]
    """The digest that each engine acknowledged."""
    digest: str
    """Digest of the weights that were published or sent."""
    to_nodes: int = 0
    """Bytes sent to other nodes: to each, all weights or a delta."""


class WeightSync(Protocol):
    """Transfers weights to engines: `push` does all of it, `publish` and `load` do it in two parts."""

    async def push(self, version: int) -> SyncReport:
        """Loads the policy's weights into every engine as `version`."""
        ...

    async def publish(self, version: int) -> None:
        """Returns once the policy may train again: `load` reads nothing that an update writes."""
        ...

    async def load(self) -> SyncReport | None:
        """Loads the version that was published last into every engine, beside an update of the trainers. Returns None
        if it did not arrive and the policy has trained since: the next version replaces it."""
        ...

    async def bring_up(self, engine: Engine) -> None:
        """Loads the current weights into a new engine. Raises UpdateDamaged if they have to be published again."""
        ...

    async def renew(self) -> None:
        """Makes the current weights available to a new engine that could not load them. Raises WorkerError."""
        ...


class FileSync:
    """Weights through a file on each node, verified by digest.

    With several nodes, the payload is sent to each node once, through the object store, and written to a file there for
    every engine of that node. A node with the previous version receives a delta if it is smaller; the result is
    verified like a whole payload. On the policy's own node the file is written whole: copying it in memory
    takes less time than comparing it.
    """

    def __init__(self, policy: PolicyGroup, pool: EnginePool, timeout_s: float, delta: bool = False) -> None:
        """`delta`: whether nodes with the previous version receive a delta."""
        self._policy = policy
        self._delta = delta
        self._pool = pool
        self._timeout_s = timeout_s
        self._current: WeightUpdate | None = None
        self._hosts_written: set[str] = set()
        """Hosts that have the current version."""
        self._hosts_before: set[str] = set()
        """Hosts that have the base of the current version's delta."""
        self._sent = 0
        self._updates = 0
        """Updates of the policy before the current version was published."""
        self._times = 0.0, 0.0
        """Begin and end of the publication of the current version (time of the event loop, in seconds)."""
        self._damaged: WeightUpdate | None = None
        """The update that a new engine could not load."""
        self._published = Changes()

    async def push(self, version: int) -> SyncReport:
        """Publishes the policy's weights as `version` and loads them into every engine.

        Publishes them once again if an engine reports damaged weights. Raises UpdateDamaged if they did not arrive the
        second time either; WeightsNotVerified if an engine acknowledged another version or digest, or did not load the
        version; EnginesLost if no engine is left and none is starting.
        """
        async with self._pool.weights.transfer(version):
            update = await self._begin(version)
            try:
                await self._write_to_hosts(update, self._pool.receivers)
                return await self._load(update)
            except UpdateDamaged as error:
                update = await self._publish_again(version, error)
                return await self._load(update)

    async def publish(self, version: int) -> None:
        """Publishes the policy's weights as `version`, a file on the node of every engine; `load` reads these alone.
        Raises UpdateDamaged if a file could not be written the second time either, because the policy is lost."""
        async with self._pool.weights.transfer(version):
            update = await self._begin(version)
            try:
                await self._write_to_hosts(update, self._pool.receivers)
            except UpdateDamaged as error:
                await self._publish_again(version, error)

    async def load(self) -> SyncReport | None:
        """Loads the published version into every engine.

        If it does not arrive, a policy that waits for samples publishes it again: without it, the engines may have none
        to give. A policy that trains no longer has it, but publishes the next one afterwards; engines that did not load
        this version stay closed until then. Returns the report, or None if the next version replaces this one. Raises
        UpdateDamaged if it did not arrive the second time either; WeightsNotVerified if an engine acknowledged another
        version or digest, or did not load the version; EnginesLost if no engine is left and none is starting.
        """
        async with self._pool.weights.lock:
            if (update := self._current) is None:
                raise RuntimeError("no version was published")
            try:
                return await self._load(update)
            except UpdateDamaged as error:
                if self._has_trained:
                    logger.warning("%s; the next version replaces version %d", error, update.version)
                    return None
                return await self._load(await self._publish_again(update.version, error))

    @property
    def _has_trained(self) -> bool:
        """Whether the policy has begun to train since the current version was published."""
        return self._policy.updates != self._updates

    async def _begin(self, version: int) -> WeightUpdate:
        """Publishes the weights as `version` for the first time."""
        began, self._sent = _now(), 0
        update = await self._publish(version, delta=self._delta)
        self._times = began, _now()
        return update

    async def _publish(self, version: int, *, delta: bool) -> WeightUpdate:
        """Writes the policy's weights as `version`; new engines receive them from now on."""
        before = self._current
        hosts = self._hosts_written - {before.host} if delta and before is not None else set[str]()
        base = before.digest if before is not None and hosts else ""
        self._updates = self._policy.updates
        update = await self._policy.publish_weights(version, base=base, timeout_s=self._timeout_s)
        self._serve(update, hosts)
        return update

    async def _publish_again(self, version: int, error: UpdateDamaged) -> WeightUpdate:
        """Publishes a version again that did not arrive, and writes all of it to every node."""
        logger.warning("%s; publishing version %d again", error, version)
        update = await self._publish(version, delta=False)
        await self._write_to_hosts(update, self._pool.receivers)
        return update

    def _serve(self, update: WeightUpdate, hosts_before: set[str]) -> None:
        """New engines receive this update from now on."""
        self._current, self._hosts_written, self._hosts_before = update, {update.host}, hosts_before
        self._published.notify()

    async def renew(self) -> None:
        """Makes the policy publish the current version again, after a new engine failed to load it. While the policy
        trains, its weights are no longer the version's: then this waits for the next one. Raises WorkerError if the
        policy is lost; TimeoutError if no version was published within `schedule.step_timeout_s`."""
        async with self._pool.weights.lock:
            damaged = self._damaged
            if damaged is None or self._current is not damaged:
                return  # another version was published since, or this one again
            if not self._has_trained:
                update = await self._policy.publish_weights(damaged.version, timeout_s=self._timeout_s)
                if update.digest == damaged.digest:
                    self._serve(update, set())
                    return
        async with asyncio.timeout(self._pool.spec.schedule.step_timeout_s):
            await self._published.wait_for(lambda: self._current is not damaged)

    async def _load(self, update: WeightUpdate) -> SyncReport:
        """Loads an update into every engine, or raises, when none of them reads it any more. Engines lost during the
        call are not in the report."""

        async def apply(engine: Engine) -> WeightAck | Exception | None:
            try:
                return await self._apply(update, engine)
            except Exception as error:
                return error  # raised once every engine has answered

        # Suspect engines too: one that recovers must not serve the previous version.
        applied = await gather_all(apply(engine) for engine in self._pool.receivers)
        for outcome in applied:
            if isinstance(outcome, Exception):
                raise outcome
        engines = {ack.engine: ack.digest for ack in applied if isinstance(ack, WeightAck)}
        began, published = self._times
        times = published - began, _now() - published
        return SyncReport(update.version, *times, update.nbytes, engines, update.digest, self._sent)

    async def bring_up(self, engine: Engine) -> None:
        update = self._current
        if update is None:
            return
        try:
            await self._write_to_hosts(update, [engine])
            _accept(await self._update(engine, update), update, engine)
        except UpdateDamaged:
            self._damaged = update
            raise

    async def _apply(self, update: WeightUpdate, engine: Engine) -> WeightAck | None:
        """Loads an update into one engine; returns None if it does not answer, after reporting that to the pool."""
        try:
            ack = await self._update(engine, update)
        except (WorkerDied, WorkerTimeout) as error:
            await self._pool.report_failure(engine, error, in_transfer=True)
            if engine in self._pool.workers:  # it answers probes, but must not serve the previous version
                raise WeightsNotVerified(f"{engine.name} did not load version {update.version}: {error}") from error
            if not self._pool.workers and not self._pool.starting:
                raise EnginesLost(f"no rollout engine is left after version {update.version}: {error}") from error
            return None
        _accept(ack, update, engine)
        return ack

    async def _update(self, engine: Engine, update: WeightUpdate) -> WeightAck:
        return await engine.handle.call(RolloutEngine.update_weights, self._timeout_s, update)

    async def _write_to_hosts(self, update: WeightUpdate, engines: list[Engine]) -> None:
        """Writes the payload to the file of hosts that lack it, through one engine of each host. A host whose engines
        are all lost still lacks it: loading it fails there as well."""
        if not (lacking := self._lacking(engines)):
            return
        try:
            await self._send_delta(update, lacking)
            if not (lacking := self._lacking(engines)):
                return
            payload = await self._policy.read_weights(update, timeout_s=self._timeout_s)
        except (WorkerDied, WorkerTimeout) as error:
            raise UpdateDamaged(error.worker, error.method, error.detail) from error
        await gather_all(self._write_whole(update, payload, engines) for engines in lacking.values())

    def _lacking(self, engines: Iterable[Engine]) -> dict[str, list[Engine]]:
        """The engines of each host that does not have the current version."""
        lacking: dict[str, list[Engine]] = {}
        for engine in engines:
            if engine.host not in self._hosts_written:
                lacking.setdefault(engine.host, []).append(engine)
        return lacking

    async def _write_whole(self, update: WeightUpdate, payload: TableRef, engines: Sequence[Engine]) -> None:
        """Writes the payload to one host, through the first of its engines that is not lost."""
        for engine in engines:
            try:
                await engine.handle.call(RolloutEngine.write_weights, self._timeout_s, update, payload)
            except (WorkerDied, WorkerTimeout) as error:
                logger.warning("%s", error)
                continue
            self._sent += update.nbytes
            self._hosts_written.add(engine.host)
            return

    async def _send_delta(self, update: WeightUpdate, lacking: Mapping[str, Sequence[Engine]]) -> None:
        """Sends the delta to hosts with the previous version; a host that cannot use it still lacks this version."""
        writers = [engines[0] for host, engines in lacking.items() if host in self._hosts_before]
        self._hosts_before = set()  # a file is changed once
        if not writers:
            return
        nbytes, delta = await self._policy.read_delta(update, timeout_s=self._timeout_s)
        if nbytes:
            await gather_all(self._change(update, delta, nbytes, engine) for engine in writers)

    async def _change(self, update: WeightUpdate, delta: TableRef, nbytes: int, engine: Engine) -> None:
        try:
            changed = await engine.handle.call(RolloutEngine.change_weights, self._timeout_s, update, delta)
        except WorkerError as error:
            logger.warning("%s; sending version %d whole", error, update.version)
            return
        self._sent += nbytes
        if changed:
            self._hosts_written.add(engine.host)


class DeviceSync:
    """Weights from device to device (nccl, ipc, gloo), verified by checksums. nccl is untested on GPU.

    The trainer's sender drives the engines. They compute the checksums of what arrived, on their own devices, and
    serve it only if these are the sender's. A failed transfer closes all engines in it; it is repeated once,
    with new connections and with the engines that still run. A change of the set of engines or of trainers connects
    them again as well.
    """

    def __init__(self, policy: PolicyGroup, pool: EnginePool, link: Link, timeout_s: float) -> None:
        self._policy = policy
        self._pool = pool
        self._link = link
        self._timeout_s = timeout_s
        self._connected: tuple[object, ...] = ()
        """Engines and trainers of the last transfer; empty if it failed."""
        self._sent: SyncReport | None = None
        """The last whole transfer."""
        self._pushes = 0
        self._missed = 0
        """Number of versions that had been sent when an engine was last brought up."""
        self._pushed = Changes()

    async def push(self, version: int) -> SyncReport:
        """Sends the policy's weights to every engine as `version`. Raises WorkerError if a trainer was lost, or the
        transfer failed twice; WeightsNotVerified if an engine acknowledged another version or digest; EnginesLost if no
        engine is left and none is starting."""
        async with self._pool.weights.transfer(version):
            try:
                report = await self._send(tuple(self._pool.receivers))
            except (WorkerDied, WorkerTimeout):
                raise
            except WorkerError as error:
                logger.warning("%s; sending version %d again", error, version)
                await gather_all(self._lose_dead(engine) for engine in list(self._pool.workers))
                if not self._pool.workers and not self._pool.starting:
                    raise EnginesLost(f"no rollout engine is left after version {version}: {error}") from error
                report = await self._send(tuple(self._pool.receivers))
        self._sent = report
        self._pushes += 1
        self._pushed.notify()
        return report

    async def publish(self, version: int) -> None:
        """Pushes and waits for the engines: trainers send from the memory that an update writes."""
        await self.push(version)

    async def load(self) -> SyncReport | None:
        """Does nothing: `publish` has loaded the version."""
        if self._sent is None:
            raise RuntimeError("no version was published")
        return self._sent

    async def bring_up(self, engine: Engine) -> None:
        """Loads the current weights into a new engine before its first token (the pool holds the lock). The other
        engines continue to serve. Raises UpdateDamaged if the policy is lost, or has trained since the version was
        sent: its weights are no longer the version's."""
        if not self._pool.weights.version:
            return
        self._missed = self._pushes
        try:
            sent = await self._send((engine,))
        except (WorkerDied, WorkerTimeout) as error:
            if error.worker not in {worker.name for worker in self._policy.workers}:
                raise
            raise UpdateDamaged(error.worker, error.method, error.detail) from error
        if self._sent is None or sent.digest != self._sent.digest:
            raise UpdateDamaged(engine.name, "bring_up", f"the policy has trained since version {sent.version}")

    async def renew(self) -> None:
        """Waits for the next version, after a new engine could not receive the current one. Raises WorkerDied if the
        policy is lost; TimeoutError if no version was sent within `schedule.step_timeout_s`."""
        died = await self._policy.find_dead()
        if died is not None:
            raise died
        async with asyncio.timeout(self._pool.spec.schedule.step_timeout_s):
            await self._pushed.wait_for(lambda: self._pushes > self._missed)

    async def _send(self, engines: tuple[Engine, ...]) -> SyncReport:
        """Sends the weights to `engines` and verifies what each one acknowledges."""
        clock = asyncio.get_running_loop().time
        started = clock()
        connected = (engines, self._policy.workers)
        reconnect = connected != self._connected
        self._connected = ()  # after a failure, also of the connection, no communicator is used again
        if reconnect:
            link = self._link([engine.handle for engine in engines])
            await self._policy.connect_engines(link, timeout_s=self._timeout_s)
        connected_at = clock()
        version = self._pool.weights.version
        sent = await self._policy.send_weights(version, timeout_s=self._timeout_s)
        for engine, ack in zip(engines, sent.acks, strict=True):
            _accept(ack, sent, engine)
        self._connected = connected
        digests = {engine.name: sent.digest for engine in engines}
        times = connected_at - started, clock() - connected_at
        return SyncReport(version, *times, sent.nbytes, digests, sent.digest)

    async def _lose_dead(self, engine: Engine) -> None:
        """Makes the pool replace the engine if its process is gone or hangs; a closed one joins the next transfer."""
        try:
            await engine.handle.call(RolloutEngine.health, self._pool.spec.failures.health_interval_s)
        except (WorkerDied, WorkerTimeout) as error:
            await self._pool.lose(engine, error)
        except WorkerError:
            pass


def _now() -> float:
    return asyncio.get_running_loop().time()


def _accept(ack: WeightAck, sent: WeightUpdate | WeightsSent, engine: Engine) -> None:
    """Takes over an acknowledgement of exactly the version and digest sent. Raises WeightsNotVerified otherwise."""
    if (ack.version, ack.digest) != (sent.version, sent.digest):
        raise WeightsNotVerified(
            f"{engine.name} acknowledged version {ack.version} digest {ack.digest}; "
            f"sent was version {sent.version} digest {sent.digest}"
        )
    engine.serves(ack.version)


def weight_sync(spec: RolloutSpec, policy: PolicyGroup, pool: EnginePool, cluster: Cluster) -> WeightSync:
    """The weight sync for the spec's back-end."""
    timeout_s = spec.schedule.sync_timeout_s
    if BACKENDS[resolved_backend(spec)].writes_file:
        return FileSync(policy, pool, timeout_s, delta=spec.weight_sync.delta == "auto")
    ranks = spec.roles.rollout.tensor_parallel_size
    return DeviceSync(policy, pool, lambda engines: cluster.link(engines, ranks, timeout_s), timeout_s)

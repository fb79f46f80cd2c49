"""Weights into the engines: publish once, hand over, verify every engine's word, and only then count the version.

An engine that cannot be reached is replaced; an engine that acknowledges anything but the version and digest that
were sent ends the run, because samples of an unknown policy are worse than none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from orchestrator.engine_pool import Engine, EnginePool
from orchestrator.errors import EnginesLost, WeightsNotVerified, WorkerDied, WorkerTimeout
from orchestrator.handles import Gang, Link, TableRef, together
from workers.messages import WeightAck, WeightUpdate, WorkerHealth


@dataclass(frozen=True)
class SyncReport:
    """One synchronisation, in seconds and bytes."""

    version: int
    publish_s: float
    apply_s: float
    nbytes: int
    engines: int


class WeightSync(Protocol):
    """How weights reach engines."""

    async def push(self, version: int) -> SyncReport:
        """Put the policy's weights, as `version`, into every engine."""
        ...


class FileSync:
    """Weights through shared memory, verified by digest.

    With several nodes, the payload crosses to each node once, through the object store, and is written to shared
    memory there for every engine of that node.
    """

    def __init__(self, policy: Gang, pool: EnginePool, timeout_s: float) -> None:
        self._policy = policy
        self._pool = pool
        self._timeout_s = timeout_s
        self._current: WeightUpdate | None = None
        self._hosts_written: set[str] = set()
        pool.bring_up = self.bring_up

    async def push(self, version: int) -> SyncReport:
        """Publish the policy's weights as `version` and put them into every engine.

        Raises WeightsNotVerified when an engine acknowledges something else, EnginesLost when none is left.
        """
        clock = asyncio.get_running_loop().time
        async with self._pool.moving:
            started = clock()
            published = await self._policy.broadcast("publish_weights", version, timeout_s=self._timeout_s)
            update = next(p for p in published if p is not None)
            self._current, self._hosts_written = update, {update.host}
            published_at = clock()
            # Engines under suspicion too: one that answers again must not serve the version before.
            engines = list(self._pool.engines)
            await self._reach_other_hosts(update, engines)
            await together(self._apply(update, engine) for engine in engines)
            return SyncReport(version, published_at - started, clock() - published_at, update.nbytes, len(engines))

    async def bring_up(self, engine: Engine) -> None:
        """Give a fresh engine the current weights before its first token (the pool holds `moving`)."""
        if self._current is not None:
            await self._reach_other_hosts(self._current, [engine])
            self._verify(await self._update(self._current, engine), self._current, engine)

    async def _apply(self, update: WeightUpdate, engine: Engine) -> None:
        try:
            ack = await self._update(update, engine)
        except (WorkerDied, WorkerTimeout) as error:
            await self._pool.report_failure(engine, error)
            if engine in self._pool.engines:  # it answers, but its update did not: it must not serve
                raise WeightsNotVerified(f"{engine.name} did not take version {update.version}: {error}") from error
            if not self._pool.engines and not self._pool.awaited:
                raise EnginesLost(f"no rollout engine is left after version {update.version}: {error}") from error
            return
        self._verify(ack, update, engine)

    async def _update(self, update: WeightUpdate, engine: Engine) -> WeightAck:
        return await engine.handle.call("update_weights", update, timeout_s=self._timeout_s)

    @staticmethod
    def _verify(ack: WeightAck, update: WeightUpdate, engine: Engine) -> None:
        if (ack.version, ack.digest) != (update.version, update.digest):
            raise WeightsNotVerified(
                f"{engine.name} acknowledged version {ack.version} digest {ack.digest}, "
                f"sent were version {update.version} digest {update.digest}"
            )
        engine.version = ack.version

    async def _reach_other_hosts(self, update: WeightUpdate, engines: list[Engine]) -> None:
        first_there = {e.host: e for e in reversed(engines) if e.host not in self._hosts_written}
        if not first_there:
            return
        payload: TableRef
        _, payload = await self._policy.workers[0].call_for_table("read_weights", update, timeout_s=self._timeout_s)
        await asyncio.gather(
            *(
                engine.handle.call("write_weights", update, payload, timeout_s=self._timeout_s)
                for engine in first_there.values()
            )
        )
        self._hosts_written |= first_there.keys()


class DeviceSync:
    """Weights from GPU to GPU by vLLM's own back-ends (nccl, ipc). Untried on a GPU.

    The trainer's sender drives the engines; afterwards each engine must say that it serves the version. These
    back-ends carry no digest: the transport vouches for the bytes. Engines that come or go are joined anew.
    """

    def __init__(self, policy: Gang, pool: EnginePool, link: Link, timeout_s: float) -> None:
        self._policy = policy
        self._pool = pool
        self._link = link
        self._timeout_s = timeout_s
        self._joined: tuple[Engine, ...] = ()
        self._version = 0
        pool.bring_up = self.bring_up

    async def push(self, version: int) -> SyncReport:
        """Send the policy's weights to every engine as `version`.

        Raises WorkerError when the transfer fails, WeightsNotVerified when an engine serves another version.
        """
        async with self._pool.moving:
            self._version = version
            return await self._send(tuple(self._pool.engines))

    async def bring_up(self, engine: Engine) -> None:
        """Give a fresh engine the current weights before its first token (the pool holds `moving`)."""
        if self._version:
            await self._send((*self._pool.engines, engine))

    async def _send(self, engines: tuple[Engine, ...]) -> SyncReport:
        clock = asyncio.get_running_loop().time
        started = clock()
        if engines != self._joined:
            link = self._link([engine.handle for engine in engines])
            await self._policy.broadcast("connect_engines", link, timeout_s=self._timeout_s)
            self._joined = engines
        joined_at = clock()
        sent = await self._policy.broadcast("send_weights", self._version, timeout_s=self._timeout_s)
        for engine in engines:
            health: WorkerHealth = await engine.handle.call("health", timeout_s=self._pool.bounds.probe_timeout_s)
            if health.version != self._version:
                raise WeightsNotVerified(f"{engine.name} serves version {health.version}, sent was {self._version}")
            engine.version = health.version
        return SyncReport(self._version, joined_at - started, clock() - joined_at, sent[0], len(engines))

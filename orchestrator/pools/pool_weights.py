"""What decides when an engine may load weights, and when trainers may use the GPUs that they share with engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from troupe.orchestrator.errors import UpdateDamaged
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.replicas import Changes

logger = logging.getLogger(__name__)

_RENEWALS = 2
"""Times that the weights are published again for one engine that starts."""

BringUp = Callable[[Engine], Awaitable[None]]
"""Loads the current weights into a new engine. Raises UpdateDamaged if they have to be published again."""
Renew = Callable[[], Awaitable[None]]
"""Makes the trainers publish the current weights again, after a restart if one of them is lost."""


class PoolWeights:
    """The weights that the engines of a pool are to have, and how an engine that joins gets them."""

    def __init__(self, bring_up: BringUp | None = None, renew: Renew | None = None) -> None:
        """No version is transferred yet.

        Args:
            bring_up: Loads the current weights into an engine, or None if engines keep those that they start with.
            renew: Publishes damaged weights again, or None to start no engine while the current weights are damaged.
        """
        self.lock = asyncio.Lock()
        """Held while weights are transferred to the engines, and while an engine joins or leaves the pool."""
        self.version = 0
        """The version whose transfer to the engines began last."""
        self.memory = MemoryLock()
        self._bring_up = bring_up
        self._renew = renew

    @asynccontextmanager
    async def transfer(self, version: int) -> AsyncIterator[None]:
        """The context in which a version is transferred to the engines: no engine joins or leaves in it."""
        async with self.lock:
            self.version = version
            yield

    async def load(self, engine: Engine) -> None:
        """Loads the current weights into an engine (the caller holds `lock`)."""
        if self._bring_up is not None:
            await self._bring_up(engine)

    async def renewing(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Awaits `attempt`, again once damaged weights are published again. It must leave lock and memory: trainers
        that are restarted for it push their weights."""
        for renewals in itertools.count():
            try:
                await attempt()
                return
            except UpdateDamaged as error:
                if self._renew is None or renewals == _RENEWALS:
                    raise
                logger.warning("%s; the trainers publish the weights again", error)
                await self._renew()


class MemoryLock:
    """Locks the memory of GPUs that engines share with the policy.

    Keeps engines from starting while trainers hold the memory, and trainers from taking it while engines start.

    Engines that serve are not counted: they sleep before the trainers take the memory. Waiting trainers come before
    engines that have not begun.
    """

    def __init__(self) -> None:
        self._training = False
        self._starting = 0
        self._changes = Changes()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Held by the trainers. Waits for engines that are starting; each start has a bound."""
        await self._changes.wait_for(lambda: not self._training)
        self._training = True
        try:
            await self._changes.wait_for(lambda: not self._starting)
            yield
        finally:
            self._training = False
            self._changes.notify()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Held by an engine that starts or loads its first weights; several can hold it. Waits for the trainers."""
        await self._changes.wait_for(lambda: not self._training)
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            self._changes.notify()

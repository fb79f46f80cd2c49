"""Locks the memory of GPUs that engines share with the policy: engines start and load weights, or trainers update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class MemoryLock:
    """Keeps engines from starting while trainers hold the memory, and trainers from taking it while engines start.

    Engines that serve are not counted: they sleep before the trainers take the memory. Waiting trainers come before
    engines that have not begun.
    """

    def __init__(self) -> None:
        self._training = False
        self._starting = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Held by the trainers. Waits for the engines that are starting, each of which has a bound."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training)
            self._training = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._starting)
            yield
        finally:
            self._training = False
            await self._notify()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Held by an engine that starts or loads its first weights; several can hold it. Waits for the trainers."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training)
            self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

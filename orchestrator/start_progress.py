"""Progress of the start of the workers, and the activity of each starting worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

_SHOWN = 6
"""Names of workers that a message lists."""
_LOOK_S = 1.0
"""Time between two looks at what the workers do that are starting."""

Progress = Callable[[int, int, str], None]
"""Called with the numbers of started workers and of all, and the names of the others."""
Activities = Callable[[Sequence[str]], Awaitable[dict[str, str]]]
"""Start-up steps of workers, by name."""


class StartProgress:
    """Reports the workers that have not started, until all of them have."""

    def __init__(
        self, activities: Activities, progress: Progress, all_names: Collection[str], served: Collection[str]
    ) -> None:
        """`all_names` and `served`: the workers of the run, and the started ones; both change."""
        self._activities = activities
        self._progress = progress
        self._all = all_names
        self._served = served
        self._doing: dict[str, str] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Looks at the workers while the block runs."""
        self.report()
        task = asyncio.create_task(self._follow(), name="follow activities")
        try:
            yield
        finally:
            task.cancel()

    def report(self) -> None:
        """Says which workers are still starting, and what they do."""
        waiting = self._waiting()
        each = [f"{name} ({self._doing[name]})" if name in self._doing else name for name in waiting[:_SHOWN]]
        more = [f"and {len(waiting) - _SHOWN} more"] if len(waiting) > _SHOWN else []
        self._progress(len(self._all) - len(waiting), len(self._all), " ".join([", ".join(each), *more]))

    def _waiting(self) -> list[str]:
        return sorted(name for name in self._all if name not in self._served)

    async def _follow(self) -> None:
        while True:
            self._doing = await self._activities(self._waiting())
            self.report()
            await asyncio.sleep(_LOOK_S)

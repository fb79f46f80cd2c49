"""The controller's garbage collector runs rarely over what is old, and often over the little that is new.

Thousands of groups in flight are some hundred thousand objects that live for as long as a group does, and nearly all of
them end by their reference counts. With Python's defaults, looking through them again and again took a third of the
controller's time, in pauses of half a second. Python counts objects made less objects freed: where as many end as begin
it does not look for a long time, and then finds tens of thousands of new ones at once. So the new ones are looked
through by the clock as well (`python -m benchmarks.controller_scale`).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_THRESHOLDS = (5_000, 2, 100_000)
"""More objects made than freed before the young ones are looked through; how many such rounds before those that were
left are, too (a few milliseconds); and how many of these, or of our own, before all are."""
_EVERY_S = 0.1
"""Between two of our own rounds: a millisecond each where 100 groups end in a second."""
_YOUNG = 1
"""What is new, and what one look has left; it counts as old after this."""


@asynccontextmanager
async def rare_collections() -> AsyncIterator[None]:
    """Collect rarely inside the block; what is there at its start is not looked through at all."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    rounds = asyncio.create_task(_rounds())
    try:
        yield
    finally:
        rounds.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def _rounds() -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        gc.collect(_YOUNG)

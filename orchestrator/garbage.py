"""The controller's garbage collector runs rarely.

Thousands of groups in flight are some hundred thousand objects that live for as long as a group does, and nearly all of
them end by their reference counts. With Python's defaults, looking through them again and again took a third of the
controller's time, in pauses of half a second (`python -m benchmarks.controller_scale`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (5_000, 2, 500)
"""More objects made than freed before the young ones are looked through; how many such rounds before those that were
left are, too (a few milliseconds); and how many of these before all are."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely inside the block; what is there at its start is not looked through at all."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

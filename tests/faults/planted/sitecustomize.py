"""Code that stalls a process of a run on request, as a bug in it would: imported by every Python process of the run.

SIGUSR2 runs what the file TROUPE_PLANTED says (`loop` or `sleep`) for as long as that file exists.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_ORDER = Path(os.environ.get("TROUPE_PLANTED", ""))


def planted_bug(*_: object) -> None:
    """Stalls the main thread."""
    sleeps = _ORDER.is_file() and _ORDER.read_text() == "sleep"
    while os.path.exists(_ORDER):
        if sleeps:
            time.sleep(0.2)


if _ORDER.name:
    signal.signal(signal.SIGUSR2, planted_bug)

"""How a piece that checks numbers ends: with a file of measurements, or with what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class NotRight(RuntimeError):
    """A piece computes, loads or serves something else than it should."""


def write_measurements(file: Path, measure: Callable[[], Mapping[str, float | str]]) -> None:
    """Measure and write the measurements; exits with code 1 where they are not right."""
    try:
        file.write_text(json.dumps(measure()))
    except NotRight as error:
        sys.exit(str(error))

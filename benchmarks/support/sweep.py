"""`--sweep`: one benchmark over several values of its settings."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

SWEPT = ("groups", "samples", "max_tokens", "concurrency", "engines", "threads")
"""Settings that `--sweep` may vary."""


def points(sweeps: Sequence[tuple[str, tuple[int, ...]]]) -> list[dict[str, int]]:
    """Every combination of the values of `--sweep`; a single empty point without sweeps."""
    names = [name for name, _ in sweeps]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in sweeps))]


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse `concurrency=16,32` into (name, values).

    Raises:
        ArgumentTypeError: The setting cannot be swept, or a value is not an integer.
    """
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT:
        raise argparse.ArgumentTypeError(f"{text}: {name!r} cannot be swept; choose from {', '.join(SWEPT)}")
    try:
        numbers = tuple(int(value) for value in values.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected {name}=NUMBER,NUMBER,...") from None
    return name, numbers


def results_path(path: Path | None, point: dict[str, int]) -> Path | None:
    """The results file of a point: `rollout.json` becomes `rollout-engines-2.json`; None (the default) stays None."""
    if path is None:
        return None
    suffix = "".join(f"-{name.replace('_', '-')}-{value}" for name, value in point.items())
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")

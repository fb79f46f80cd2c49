"""One benchmark over several values of its settings."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

SWEPT = ("groups", "samples", "max_tokens", "concurrency", "engines", "threads")
"""Settings that `--sweep` may vary."""


def points(sweeps: Sequence[tuple[str, tuple[int, ...]]]) -> list[dict[str, int]]:
    """Every combination of the values of `--sweep`; one empty point without any."""
    names = [name for name, _ in sweeps]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in sweeps))]


def swept(text: str) -> tuple[str, tuple[int, ...]]:
    """`concurrency=16,32` as (name, values). Raises ArgumentTypeError."""
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT:
        raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(SWEPT)} can be swept")
    try:
        numbers = tuple(int(value) for value in values.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected {name}=NUMBER,NUMBER,...") from None
    return name, numbers


def named(path: Path | None, point: dict[str, int]) -> Path | None:
    """`rollout.json` becomes `rollout-engines-2.json`; None (the default place) stays."""
    if path is None:
        return None
    suffix = "".join(f"-{name.replace('_', '-')}-{value}" for name, value in point.items())
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")

"""Small settings that the tests of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.workload import Settings

SETTINGS = Settings(
    model=Path(".cache/models/tiny-llama"),
    dtype="float32",
    lengths="fixed",
    groups=2,
    samples=2,
    max_tokens=3,
    concurrency=4,
    engines=1,
    threads=1,
    seed=5,
)

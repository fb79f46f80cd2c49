"""Measurements of a piece that passed, from the files in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from deploy.gpu_check.pieces import MEASUREMENTS, RUN, Kind
from deploy.gpu_check.record import Measurement

_PRODUCT = "troupe"


def measurements(kind: Kind, folder: Path) -> dict[str, Measurement]:
    """The measurements of a piece.

    Raises:
        OSError: A file that the piece should have written is missing.
        ValueError: Such a file has no measurements.
    """
    if kind == "run":
        return _of_run(folder / RUN / "metrics.jsonl")
    document = json.loads((folder / MEASUREMENTS).read_text())
    return document if kind == "probe" else _of_benchmark(document)


def _of_run(metrics: Path) -> dict[str, Measurement]:
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    if not steps:
        raise ValueError(f"{metrics} has no step")
    memory = {name: value for name, value in steps[-1].items() if name.startswith("memory/")}
    return {
        "steps": len(steps),
        "reward, first step": steps[0]["reward/mean"],
        "reward, last step": steps[-1]["reward/mean"],
        "s per step": median(step["seconds/step"] for step in steps),
        "s per sync": median(step["seconds/sync"] for step in steps),
        "response tokens/s": median(step["response_tokens_per_s"] for step in steps),
    } | {f"{name.removeprefix('memory/')}, GiB": value for name, value in memory.items()}


def _of_benchmark(document: dict[str, dict[str, dict[str, dict[str, float]]]]) -> dict[str, Measurement]:
    summary = document["summary"]
    checks = {str(name): str(outcome) for name, outcome in document["checks"].items()}
    if _PRODUCT in summary:
        return _of_contender(summary[_PRODUCT]) | checks
    found = {
        f"{contender}: {name}": value
        for contender, spreads in summary.items()
        for name, value in _of_contender(spreads).items()
    }
    return found | checks


def _of_contender(spreads: dict[str, dict[str, float]]) -> dict[str, Measurement]:
    rates = {key: value for key, value in spreads.items() if key.endswith(("_per_s", "ratio"))}
    found: dict[str, Measurement] = {key: spread["median"] for key, spread in rates.items()}
    return found | {"s per turn": spreads["wall_s"]["median"]}

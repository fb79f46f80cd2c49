"""Regression check: small versions of the benchmarks in a few minutes, compared with recorded ratios.

    python -m benchmarks.quick            # exit code 1 if a ratio is worse than recorded, 2 if nothing is recorded
    python -m benchmarks.quick --write    # record the ratios of this kind of machine, from three runs

The ratios are those of a tiny model: they show that something changed, not how fast the product is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.support.harness import Spread, command_parser, machine, progress
from benchmarks.support.regression import (
    RatioChange,
    Ratios,
    baseline_path,
    compare,
    pool_runs,
    ratios_of,
    read_baseline,
    write_baseline,
)

TINY = ("--model", ".cache/models/tiny-llama", "--dtype", "float32")
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "weight_sync": (*TINY, "--samples", "2", "--max-tokens", "4", "--turns", "7"),
    "grpo_step": (
        *TINY,
        "--groups",
        "4",
        "--samples",
        "4",
        "--max-tokens",
        "16",
        "--turns",
        "5",
        "--micro-batch-tokens",
        "4096",
    ),
    "controller_cost": ("--groups", "64", "--steps", "6", "--turns", "5"),
    "pipeline_bubble": ("--groups", "16", "--staleness", "1", "--mean-ms", "50", "--train-ms", "75"),
    "data_plane": ("--samples", "256", "--repeat", "2", "--turns", "7"),
}
"""Arguments of each benchmark. Sampling is compared as a phase of grpo_step, because starting engines takes longest."""
PHASES = {"grpo_step": ("generate", "update")}
"""Phases that are compared separately."""
LONGEST_S = 300
NO_BASELINE = 2
"""Exit code where nothing is recorded for this kind of machine."""


def run(names: Sequence[str]) -> Ratios:
    """Run the benchmarks one after another. Raises CalledProcessError where one of them fails."""
    ratios: Ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            results = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name], "--json", str(results)]
            began = time.monotonic()
            subprocess.run(command, check=True, timeout=LONGEST_S, stdout=subprocess.DEVNULL)
            progress(f"{name} took {time.monotonic() - began:.0f} s")
            ratios |= ratios_of(json.loads(results.read_text()), PHASES.get(name, ()))
    return ratios


def judge(recorded: Ratios, names: Sequence[str]) -> list[RatioChange]:
    """Run and judge the benchmarks `names`; a benchmark with a bad verdict runs again, and the second run decides."""
    recorded = {name: spread for name, spread in recorded.items() if benchmark_of(name) in names}
    verdicts = compare(recorded, run(names))
    again = sorted({benchmark_of(verdict.name) for verdict in verdicts if verdict.bad})
    if not again:
        return verdicts
    second = {verdict.name: verdict for verdict in compare(recorded, run(again))}
    return [second[verdict.name] if verdict.bad else verdict for verdict in verdicts]


def benchmark_of(ratio: str) -> str:
    """The name of the benchmark that a ratio belongs to."""
    return ratio.partition(":")[0]


def show(verdicts: Sequence[RatioChange]) -> None:
    """Print the table of verdicts."""
    table = Table(title="ratios to each benchmark's own baseline, median (min .. max)")
    for title in ("ratio", "recorded", "now", ""):
        table.add_column(title)
    for verdict in verdicts:
        table.add_row(verdict.name, _text(verdict.recorded), _text(verdict.measured), verdict.outcome)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _text(spread: Spread | None) -> str:
    return "-" if spread is None else spread.text(3)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("quick", __doc__)
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="benchmarks to run (default: all)"
    )
    parser.add_argument(
        "--write", action="store_true", help="record the ratios as the baseline of this kind of machine"
    )
    parser.add_argument("--runs", type=int, default=3, help="number of runs that --write combines (default: 3)")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, then compare or record; returns the exit code."""
    given = parse(sys.argv[1:])
    began, kind = time.monotonic(), machine()
    path = baseline_path(kind)
    recorded = read_baseline(path) if path.is_file() and not given.write else None
    if recorded is None:
        runs = given.runs if given.write else 1
        verdicts = compare({}, pool_runs([run(given.only) for _ in range(runs)]))
    else:
        verdicts = judge(recorded, given.only)
    show(verdicts)
    print(f"{time.monotonic() - began:.0f} s")
    if given.write:
        write_baseline(path, kind, {verdict.name: verdict.measured for verdict in verdicts if verdict.measured})
        print(f"wrote {path}")
    elif recorded is None:
        print(f"no baseline is recorded for this kind of machine ({path}): record one with --write")
        return NO_BASELINE
    bad = [verdict for verdict in verdicts if verdict.bad]
    for verdict in bad:
        print(f"{verdict.outcome}: {verdict.name}: {_text(verdict.measured)}, recorded {_text(verdict.recorded)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

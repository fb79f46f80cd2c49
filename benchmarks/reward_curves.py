"""Reward curves of finished runs as one Markdown table, as in docs/explanation/results.md.

python -m benchmarks.reward_curves runs/grpo runs/rloo chain=runs/three-stage/ppo
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.harness import command_parser

METRIC = "reward/mean"


def curve(run: Path, metric: str) -> dict[int, float]:
    """The metric by step. Raises ValueError where no finished step of the run has it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line[metric] for line in lines if line.get(metric) is not None}
    if not found:
        raise ValueError(f"{run}: no finished step has {metric}")
    return found


def table(curves: dict[str, dict[int, float]]) -> str:
    """A table with one row per step and one column per run; cells after the end of a run are empty."""
    steps = sorted({step for values in curves.values() for step in values})
    rows = [["step", *curves], ["---:"] * (1 + len(curves))]
    rows += [
        [str(step), *(f"{values[step]:.3f}" if step in values else "" for values in curves.values())] for step in steps
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def named(text: str) -> tuple[str, Path]:
    """Parse `NAME=RUN` or `RUN`, the folder of a run, into (name, folder); the name defaults to the folder's."""
    name, equals, folder = text.rpartition("=")
    return (name, Path(folder)) if equals else (Path(text).name, Path(text))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("reward_curves", __doc__)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="folders of runs, with names for the columns")
    parser.add_argument("--metric", default=METRIC, help=f"a metric of metrics.jsonl (default: {METRIC})")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    given = parse(sys.argv[1:])
    sys.stdout.write(table({name: curve(run, given.metric) for name, run in map(named, given.runs)}) + "\n")


if __name__ == "__main__":
    main()

"""Reward curves of finished runs as one Markdown table; docs/results.md is made of it.

python -m benchmarks.reward_curves runs/grpo runs/rloo chain=runs/three-stage/ppo
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

FIGURE = "reward/mean"


def curve(run: Path, figure: str) -> dict[int, float]:
    """The figure by step. Raises ValueError where the run has no finished step with it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line[figure] for line in lines if line.get(figure) is not None}
    if not found:
        raise ValueError(f"{run}: no finished step has {figure}")
    return found


def table(curves: dict[str, dict[int, float]]) -> str:
    """One row a step, one column a run; a run that has ended leaves its cells empty."""
    steps = sorted({step for values in curves.values() for step in values})
    rows = [["step", *curves], ["---:"] * (1 + len(curves))]
    rows += [
        [str(step), *(f"{values[step]:.3f}" if step in values else "" for values in curves.values())] for step in steps
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def named(text: str) -> tuple[str, Path]:
    """`NAME=RUN`, or the folder of a run, which then names it."""
    name, equals, folder = text.rpartition("=")
    return (name, Path(folder)) if equals else (Path(text).name, Path(text))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_curves", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="folders of runs, and what to call them")
    parser.add_argument("--figure", default=FIGURE, help="a name in metrics.jsonl")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    given = parse(sys.argv[1:])
    sys.stdout.write(table({name: curve(run, given.figure) for name, run in map(named, given.runs)}) + "\n")


if __name__ == "__main__":
    main()

"""The goals of the suite's benchmarks, and their measurements in what the benchmarks recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.support.harness import Spread, Turn, ratios


@dataclass(frozen=True)
class Goal:
    """The goal for one measurement of a benchmark."""

    what: str
    contender: str
    figure: str
    """`ratio`, or a name in the contender's summary or its figures."""
    goal: float
    over: str = ""
    """The contender that a ratio is relative to; empty for the baseline."""
    most: bool = False
    """Whether the goal is a maximum; otherwise it is a minimum."""
    digits: int = 3
    """Decimals in the table."""

    def met(self, found: float) -> bool:
        """Whether a measured value meets the goal."""
        return found <= self.goal if self.most else found >= self.goal

    @property
    def text(self) -> str:
        """The goal as it is printed."""
        return f"{'at most' if self.most else 'at least'} {self.goal:g}"


@dataclass(frozen=True)
class Benchmark:
    """One command of the suite."""

    module: str
    arguments: tuple[str, ...]
    goals: tuple[Goal, ...]
    variant: str = ""
    """Distinguishes benchmarks of the same module."""
    estimate_s: int = 600
    """Seconds that the command takes on two cores, until it has been recorded."""

    @property
    def name(self) -> str:
        """Name of the results file, without its suffix."""
        return "-".join(filter(None, (self.module, self.variant)))

    @property
    def command(self) -> str:
        """The command line as a user types it."""
        return " ".join(("python -m", f"benchmarks.{self.module}", *self.arguments))


def figure_of(document: Mapping[str, Any], goal: Goal) -> Spread:
    """The measurement of a goal in a benchmark's results. Raises KeyError where the results do not have it."""
    if goal.over:
        own, other = ([Turn(**turn) for turn in document["turns"][name]] for name in (goal.contender, goal.over))
        return Spread.of(ratios(own, other))
    summary = document["summary"][goal.contender]
    return Spread(**(summary[goal.figure] if goal.figure in summary else summary["figures"][goal.figure]))

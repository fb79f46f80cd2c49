"""Where a run is, from the log of its job: the job server has only what was printed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_STEP = re.compile(r"step (\d+)/(\d+)  ")
_REWARD = re.compile(r"  reward (-?\d+(?:\.\d+)?)\b")
_LEFT = re.compile(r"  (\S[^=]*?) left$")
_STARTING = re.compile(r"starting ((?:\d+ \w+(?:, )?)+)$")
_SCALED = re.compile(r"(\w+): (?:\d+ -> )?(\d+) workers\b")


@dataclass(frozen=True)
class RunProgress:
    """Facts in a log about its run."""

    step: int = 0
    """Steps that have ended."""
    steps: int | None = None
    """Steps in all; None before the first has ended."""
    reward: float | None = None
    """Mean reward of the last step."""
    left: str | None = None
    """Time that the run still takes."""
    workers: dict[str, int] = field(default_factory=dict)
    """Workers by role."""
    line: str = ""
    """The line of the last step."""

    def lines(self) -> list[str]:
        """What a terminal shows."""
        workers = ", ".join(f"{count} {role}" for role, count in self.workers.items())
        return [line for line in (f"workers: {workers}" if workers else "", self.line) if line]


def run_progress(log: str) -> RunProgress:
    """Read a job's log. The last step counts, and the workers as they were started and scaled since."""
    workers: dict[str, int] = {}
    last = ""
    for line in log.splitlines():
        if found := _STARTING.match(line):
            pairs = (part.split() for part in found[1].split(", "))
            workers = {role: int(count) for count, role in pairs}
        elif (found := _SCALED.match(line)) and found[1] in workers:
            workers[found[1]] = int(found[2])
        elif _STEP.match(line):
            last = line
    step, reward, left = (pattern.search(last) for pattern in (_STEP, _REWARD, _LEFT))
    return RunProgress(
        step=int(step[1]) if step else 0,
        steps=int(step[2]) if step else None,
        reward=float(reward[1]) if reward else None,
        left=left[1].rsplit("  ", 1)[-1] if left else None,
        workers=workers,
        line=last,
    )

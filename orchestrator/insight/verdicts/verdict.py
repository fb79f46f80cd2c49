"""A verdict: its severity, evidence and remedies."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import yaml

from troupe.orchestrator.insight.verdicts.history import Stretch

Name = Literal[
    "failed-run",
    "dead-run",
    "no-steps",
    "entropy-collapse",
    "reward-hacking",
    "no-signal",
    "reward-falls",
    "penalty-dominates",
    "overfitting",
    "length-explosion",
    "length-collapse",
    "truncation",
    "kl-explosion",
    "steps-too-large",
    "clip-fraction",
    "sampler-gap",
    "gradient-spikes",
    "clipped-gradients",
    "blind-critic",
    "failing-rewards",
    "repeated-data",
    "unusable-data",
    "dropped-samples",
    "slow-rewards",
    "slow-engine",
    "starved-trainer",
    "starved-engines",
    "growing-memory",
    "lost-workers",
]
"""Names of verdicts, which stay the same from version to version."""


class Level(StrEnum):
    """How bad it is. Only `problem` and `warning` make a run unhealthy."""

    PROBLEM = "problem"
    """The run will not recover, or its result cannot be trusted."""
    WARNING = "warning"
    """The run learns less, or more slowly, than it could; or it is on its way to a problem."""
    NOTE = "note"
    """Worth knowing; a healthy run may look the same."""


def while_it_lasts(found: Stretch, level: Level) -> Level:
    """The level of what holds for a stretch: what is over, and the run went on, is a note."""
    return level if found.ongoing else Level.NOTE


@dataclass(frozen=True)
class Remedy:
    """A change to try."""

    text: str
    spec: str = ""
    """Lines of the spec; empty if the change is not in the spec."""
    set: tuple[str, ...] = dataclasses.field(init=False)
    """The same as values of `--set`."""

    def __post_init__(self) -> None:
        fields = _fields(yaml.safe_load(self.spec) or {})
        object.__setattr__(self, "set", tuple(f"{path}={value}" for path, value in fields))

    @property
    def line(self) -> str:
        """The change in one line, with the fields to set as options of a command."""
        return " ".join([self.text, *(f"--set {shlex.quote(value)}" for value in self.set)])


@dataclass(frozen=True)
class Verdict:
    """One finding about a run."""

    name: Name
    level: Level
    title: str
    summary: str
    """One or two sentences with the numbers."""
    since: int
    """First step at which it holds."""
    until: int | None = None
    """Last step at which it held, or None if it holds at the last step of the record."""
    evidence: tuple[str, ...] = ()
    """Metrics to plot with it."""
    remedies: tuple[Remedy, ...] = ()

    @property
    def is_alarm(self) -> bool:
        """Whether the run is not healthy."""
        return self.level is not Level.NOTE

    def lines(self) -> list[str]:
        """What a terminal shows: the finding, and each change to try."""
        span = f"since step {self.since}" if self.until is None else f"steps {self.since} to {self.until}"
        found = f"{self.level}: {self.title} ({span}): {self.summary}"
        return [found, *(f"  try: {remedy.line}" for remedy in self.remedies)]


def field(path: str, value: object) -> str:
    """Lines of a spec that set one field: `roles.policy.learning_rate` becomes three nested lines."""
    *sections, name = path.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    return "\n".join([*lines, f"{'  ' * len(sections)}{name}: {_shown(value)}"])


def flow(path: str, items: Sequence[Mapping[str, Any]]) -> str:
    """Lines of a spec that set a list of sections, each on a line; what is null or empty is left out."""
    rows = [{name: value for name, value in item.items() if value not in (None, {}, [], "")} for item in items]
    head = field(path, "").rstrip()
    indent = " " * (2 * path.count(".") + 2)
    texts = [yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=10_000).strip() for row in rows]
    return "\n".join([head, *(f"{indent}- {text}" for text in texts)])


def _fields(node: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, str]]:
    for name, value in node.items():
        path = f"{below}{name}"
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{path}.")
        else:
            yield path, _option(value)


def _option(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

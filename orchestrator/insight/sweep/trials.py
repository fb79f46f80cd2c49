"""The trials of a sweep: settings on a grid or drawn at random, each with several seeds, as checked specs.

A trial of a file with stages is the whole chain; what is compared is its last run.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.bench.points import Sweep, parse_sweep, settings_label
from troupe.orchestrator.live.diff import field_changes
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun, is_chain, results_folder
from troupe.orchestrator.spec.errors import Problem, SpecError
from troupe.orchestrator.spec.yaml_reader import OVERRIDE, Document, override

MOST_TRIALS = 1000
_NUMBER = r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_OWN = re.compile(r"name|(stages\.[^.]+\.)?seed")
"""Fields that a sweep sets in each trial."""

Settings = Mapping[str, Any]
"""Values by the dotted path of their field."""
Plan = Callable[[list[str], Path | None], tuple[Document, tuple[PlannedRun, ...]]]
"""Reads the file with these assignments and plans its runs, in this folder or the file's. Raises SpecError."""


@dataclass(frozen=True)
class Range:
    """The numbers between two, drawn evenly in their logarithm; whole numbers if both are."""

    low: float
    high: float

    def draw(self, source: random.Random) -> float:
        """A number, with four digits."""
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return round(drawn) if isinstance(self.low, int) and isinstance(self.high, int) else float(f"{drawn:.4g}")


@dataclass(frozen=True)
class Trial:
    """One run, or chain of runs, of a sweep."""

    name: str
    """Name of its folder: `trial-001`."""
    setting: int
    """Number of its setting, from 0; the trials of a setting differ in the seed."""
    settings: Settings
    folder: Path
    document: Document
    """The file with its assignments."""
    runs: tuple[PlannedRun, ...]

    @property
    def spec(self) -> RunSpec:
        """Spec of the last run, whose metrics are compared."""
        return self.runs[-1].spec

    @property
    def last(self) -> Path:
        """Folder of the last run."""
        return self.runs[-1].out

    def pinned(self, runs: Sequence[PlannedRun]) -> Trial:
        """The trial with these runs, whose names on the hub are pinned to commits, as is a chain's document."""
        pins = [
            _pin(run, field)
            for before, run in zip(self.runs, runs, strict=True)
            for field, *_ in (field_changes(before.spec, run.spec) if is_chain(self.document) else ())
        ]
        return replace(self, runs=tuple(runs), document=override(self.document, list(dict.fromkeys(pins))))

    @property
    def label(self) -> str:
        """The setting and the seed as text."""
        return ", ".join(filter(None, (settings_label(self.settings), f"seed {self.spec.seed}")))


def parse_axes(texts: Sequence[str], *, ranges: bool) -> tuple[Settings, dict[str, Sweep | Range]]:
    """Split `FIELD=VALUE,...` into the fields with one value and those that vary. Raises SpecError; UsageError if a
    field is given twice, or a range is none or, unless `ranges`, given at all."""
    fixed: dict[str, Any] = {}
    varied: dict[str, Sweep | Range] = {}
    for text in texts:
        sweep = parse_sweep(text, OVERRIDE)
        if sweep.field in fixed or sweep.field in varied:
            raise UsageError(f"{OVERRIDE} {sweep.field} is given twice")
        found = _RANGE.fullmatch(sweep.values[0]) if isinstance(sweep.values[0], str) else None
        if found is not None and len(sweep.values) == 1:
            varied[sweep.field] = _range(sweep.field, found[1], found[2], allowed=ranges)
        elif len(sweep.values) == 1:
            fixed[sweep.field] = sweep.values[0]
        else:
            varied[sweep.field] = sweep
    return fixed, varied


def _range(field: str, low: str, high: str, *, allowed: bool) -> Range:
    if not allowed:
        raise UsageError(f"{OVERRIDE} {field}={low}..{high} is a range: --random N draws from it")
    ends = [int(end) if end.isdecimal() else float(end) for end in (low, high)]
    if not 0 < ends[0] < ends[1]:
        raise UsageError(f"{OVERRIDE} {field}={low}..{high}: expected two numbers above 0, the smaller one first")
    return Range(*ends)


def grid(varied: Mapping[str, Sweep | Range]) -> list[Settings]:
    """Every combination of the values; one without any if no field varies."""
    values = [axis.values for axis in varied.values() if isinstance(axis, Sweep)]
    return [dict(zip(varied, combination, strict=True)) for combination in itertools.product(*values)]


def drawn(varied: Mapping[str, Sweep | Range], count: int, seed: int) -> list[Settings]:
    """Different settings drawn at random, the same ones for a seed. Raises UsageError if there are not more."""
    source = random.Random(seed)
    if not any(isinstance(axis, Range) for axis in varied.values()):
        every = grid(varied)
        if count >= len(every):
            raise UsageError(f"--random {count}: there are {len(every)} settings; leave it out to run them all")
        return source.sample(every, count)
    return [
        {
            field: axis.draw(source) if isinstance(axis, Range) else source.choice(axis.values)
            for field, axis in varied.items()
        }
        for _ in range(count)
    ]


def plan_trials(plan: Plan, fixed: Settings, settings: Sequence[Settings], seeds: int, out: Path | None) -> list[Trial]:
    """The trials of a sweep, the first seed of all settings before the second. Raises SpecError with every problem of
    any of them; UsageError if there are too many."""
    if len(settings) * seeds > MOST_TRIALS:
        raise UsageError(f"{len(settings) * seeds} trials are more than {MOST_TRIALS}")
    if taken := [field for field in settings[0] if _OWN.fullmatch(field)]:
        raise UsageError(f"{OVERRIDE} {min(taken)}: a sweep sets it in each trial; --seeds N tries N seeds")
    trials: list[Trial] = []
    problems: dict[Problem, None] = {}
    for number, (seed, setting) in enumerate(itertools.product(range(seeds), range(len(settings))), start=1):
        name, values = f"trial-{number:03d}", settings[setting]
        try:
            _, runs = plan(_assignments({**fixed, **values}), None)
            base = results_folder(runs)
            folder = (out or base.with_name(f"{base.name}-sweep")) / name
            seeds_of = {run.field("seed"): run.spec.seed + seed for run in runs}
            own = {"name": f"{base.name}-{number:03d}", **seeds_of}
            trials.append(Trial(name, setting, values, folder, *plan(_assignments({**fixed, **values, **own}), folder)))
        except SpecError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise SpecError([*problems])
    return trials


def _assignments(settings: Settings) -> list[str]:
    return [f"{field}={json.dumps(value)}" for field, value in settings.items()]


def _pin(run: PlannedRun, field: str) -> str:
    """The assignment of a field of a run, or of the list that holds it, to its stage."""
    path = [*itertools.takewhile(lambda part: not part.isdigit(), field.split("."))]
    value = reduce(getitem, path, run.spec.model_dump(mode="json"))
    return f"{run.field('.'.join(path))}={json.dumps(value)}"

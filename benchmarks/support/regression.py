"""Regression check of `benchmarks.quick`: measured ratios against those recorded on the same kind of machine.

Only ratios to a baseline of the same turn are compared, because absolute times depend on other load on the machine. A
ratio is worse when its median is below every recorded turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.support.harness import Spread, Turn, kind_of, ratios, versions

BASELINES = Path(__file__).parents[1] / "baselines"

Ratios = dict[str, Spread]
"""Spread by `benchmark: contender`; above 1 is faster than the benchmark's own baseline."""


@dataclass(frozen=True)
class RatioChange:
    """The comparison of one ratio: as recorded and as measured."""

    name: str
    outcome: Literal["as before", "better", "worse", "missing", "new"]
    recorded: Spread | None
    measured: Spread | None

    @property
    def bad(self) -> bool:
        """Whether the ratio is worse, or recorded but not measured."""
        return self.outcome in ("worse", "missing")


def compare(recorded: Mapping[str, Spread], measured: Mapping[str, Spread]) -> list[RatioChange]:
    """A verdict on every ratio of either mapping: in recorded order, then the new ones."""
    names = [*recorded, *(name for name in measured if name not in recorded)]
    return [_verdict(name, recorded.get(name), measured.get(name)) for name in names]


def _verdict(name: str, recorded: Spread | None, measured: Spread | None) -> RatioChange:
    if measured is None:
        return RatioChange(name, "missing", recorded, measured)
    if recorded is None:
        return RatioChange(name, "new", recorded, measured)
    if measured.median < recorded.low:
        return RatioChange(name, "worse", recorded, measured)
    return RatioChange(name, "better" if measured.median > recorded.high else "as before", recorded, measured)


def ratios_of(document: Mapping[str, Any], phases: Sequence[str] = ()) -> Ratios:
    """The ratios in a results file, excluding the baseline's ratio to itself.

    Args:
        document: A results file, as `Report.write` writes it.
        phases: Phases to compare separately as well, by amount per second of the phase.
    """
    found: Ratios = {}
    baseline = [Turn(**turn) for turn in document["turns"][document["baseline"]]]
    for contender, figures in document["summary"].items():
        if contender != document["baseline"]:
            name, turns = f"{document['benchmark']}: {contender}", [Turn(**t) for t in document["turns"][contender]]
            found[name] = Spread(**figures["ratio"])
            for phase in phases:
                found[f"{name}, {phase}"] = Spread.of(ratios(_in_phase(turns, phase), _in_phase(baseline, phase)))
    return found


def _in_phase(turns: Sequence[Turn], phase: str) -> list[Turn]:
    """The turns with the seconds of this phase as their wall time."""
    return [replace(turn, wall_s=turn.phases[phase]) for turn in turns]


def pool_runs(runs: Sequence[Ratios]) -> Ratios:
    """Combine runs of the same benchmarks: median of the medians, minimum and maximum over all turns.

    Runs differ from each other more than the turns of one run do.
    """
    by_name = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: Spread(median(one.median for one in found), min(one.low for one in found), max(one.high for one in found))
        for name, found in by_name.items()
    }


def baseline_path(machine: Mapping[str, Any], folder: Path = BASELINES) -> Path:
    """The baseline file of a kind of machine, named as `harness.kind_of` names it."""
    return folder / f"{kind_of(machine)}.json"


def read_baseline(path: Path) -> Ratios:
    """Read what `write_baseline` wrote. Raises FileNotFoundError."""
    document = json.loads(path.read_text())
    return {name: Spread(**spread) for name, spread in document["ratios"].items()}


def write_baseline(path: Path, machine: Mapping[str, Any], ratios: Mapping[str, Spread]) -> None:
    """Record ratios for a kind of machine; recorded ratios of benchmarks that are not in `ratios` stay unchanged."""
    kept = read_baseline(path) if path.is_file() else {}
    benchmarks = {name.partition(":")[0] for name in ratios}
    merged = {name: spread for name, spread in kept.items() if name.partition(":")[0] not in benchmarks} | dict(ratios)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": {key: machine[key] for key in ("cpu", "cores")},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "ratios": {name: asdict(merged[name]) for name in sorted(merged)},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")

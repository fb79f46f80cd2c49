"""Comparison of ratios with recorded ones, and baseline files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.harness import Report, Spread, Turn
from benchmarks.support.regression import baseline_path, compare, pool_runs, ratios_of, read_baseline, write_baseline

MACHINE = {"cpu": "Some(R) CPU @ 2.50GHz", "cores": 2, "memory_gib": 8.0}


def spread(low: float, median: float, high: float) -> Spread:
    return Spread(median, low, high)


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [
        (spread(0.80, 0.95, 1.00), "as before"),
        (spread(0.80, 0.90, 1.00), "as before"),  # on the edge of what was recorded
        (spread(0.80, 0.89, 1.20), "worse"),
        (spread(0.99, 1.11, 1.20), "better"),
    ],
)
def test_a_median_outside_the_recorded_spread_is_better_or_worse(measured: Spread, outcome: str) -> None:
    (verdict,) = compare({"a: x": spread(0.9, 1.0, 1.1)}, {"a: x": measured})
    assert (verdict.outcome, verdict.bad) == (outcome, outcome == "worse")


def test_a_missing_ratio_is_bad_and_a_new_one_is_not() -> None:
    one = spread(1.0, 1.0, 1.0)
    verdicts = compare({"b: x": one, "a: x": one}, {"c: x": one, "a: x": one})
    assert [(verdict.name, verdict.outcome) for verdict in verdicts] == [
        ("b: x", "missing"),
        ("a: x", "as before"),
        ("c: x", "new"),
    ]
    assert [verdict.bad for verdict in verdicts] == [True, False, False]


def test_ratios_come_from_a_results_file_without_the_baseline_itself(tmp_path: Path) -> None:
    taken = {"bare": [Turn(1.0, 10, 1.0, 0.0)] * 3, "troupe": [Turn(1.0, amount, 1.0, 0.0) for amount in (8, 9, 12)]}
    document = json.loads(Report("some", {}, taken, "bare", {}).write(tmp_path / "some.json").read_text())
    assert ratios_of(document) == {"some: troupe": spread(0.8, 0.9, 1.2)}


def test_a_phase_has_a_ratio_of_its_own(tmp_path: Path) -> None:
    def turns(generate: float, update: float) -> list[Turn]:
        return [Turn(generate + update, 10, 1.0, 0.0, {"generate": generate, "update": update})] * 2

    report = Report("some", {}, {"bare": turns(1.0, 2.0), "troupe": turns(2.0, 1.0)}, "bare", {})
    document = json.loads(report.write(tmp_path / "some.json").read_text())
    assert ratios_of(document, ("generate", "update")) == {
        "some: troupe": spread(1.0, 1.0, 1.0),
        "some: troupe, generate": spread(0.5, 0.5, 0.5),
        "some: troupe, update": spread(2.0, 2.0, 2.0),
    }


def test_a_kind_of_machine_has_one_file(tmp_path: Path) -> None:
    path = baseline_path(MACHINE, tmp_path)
    assert path == tmp_path / "some-r-cpu-2.50ghz-2-cores.json"
    assert baseline_path(MACHINE | {"cores": 4}, tmp_path) != path
    assert baseline_path(MACHINE | {"memory_gib": 16.0}, tmp_path) == path


def test_recording_replaces_only_the_benchmarks_that_were_measured(tmp_path: Path) -> None:
    path, old, new = tmp_path / "b" / "m.json", spread(1.0, 1.0, 1.0), spread(2.0, 2.0, 2.0)
    write_baseline(path, MACHINE, {"a: x": old, "a: gone": old, "b: x": old})
    write_baseline(path, MACHINE, {"a: x": new})
    assert read_baseline(path) == {"a: x": new, "b: x": old}
    assert json.loads(path.read_text())["machine"] == {"cpu": MACHINE["cpu"], "cores": 2}


def test_runs_are_pooled_by_their_medians_and_all_their_turns() -> None:
    runs = [{"a: x": spread(0.9, 1.0, 1.1)}, {"a: x": spread(0.7, 0.8, 0.9)}, {"a: x": spread(0.8, 1.2, 1.3)}]
    assert pool_runs(runs) == {"a: x": spread(0.7, 1.0, 1.3)}
    assert pool_runs(runs[:1]) == runs[0]

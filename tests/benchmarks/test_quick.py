"""Verdicts and arguments of quick."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import quick
from benchmarks.support.harness import Spread


def spread(low: float, median: float, high: float) -> Spread:
    return Spread(median, low, high)


def test_a_verdict_is_bad_only_if_the_second_run_is_bad_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {"a: x": spread(0.9, 1.0, 1.1), "b: x": spread(0.9, 1.0, 1.1), "c: x": spread(0.9, 1.0, 1.1)}
    slow, fine = spread(0.5, 0.5, 0.5), spread(1.0, 1.0, 1.0)
    runs = [{"a: x": slow, "b: x": slow}, {"a: x": fine, "b: x": slow}]
    asked: list[list[str]] = []

    def run(names: list[str]) -> dict[str, Spread]:
        asked.append(list(names))
        return runs[len(asked) - 1]

    monkeypatch.setattr(quick, "run", run)
    verdicts = quick.judge(recorded, ["a", "b"])
    assert asked == [["a", "b"], ["a", "b"]]
    assert {verdict.name: verdict.outcome for verdict in verdicts} == {"a: x": "as before", "b: x": "worse"}


def test_nothing_is_run_again_where_nothing_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    fine = {"a: x": spread(1.0, 1.0, 1.0)}
    monkeypatch.setattr(quick, "run", lambda names: calls.append(names) or fine)
    assert [verdict.outcome for verdict in quick.judge(fine, ["a"])] == ["as before"]
    assert len(calls) == 1


@pytest.mark.parametrize("name", quick.BENCHMARKS)
def test_a_quick_benchmark_takes_its_arguments(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.parse(quick.BENCHMARKS[name]).turns >= 5

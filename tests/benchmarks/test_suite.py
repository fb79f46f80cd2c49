"""The suite's table: goals against what benchmarks left."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import suite
from benchmarks.suite import BEGIN, END, SUITE, Benchmark, Goal, figure_of, table, write_page
from benchmarks.support.harness import Report, Turn

ONE = Benchmark(
    "one",
    ("--turns", "2"),
    (Goal("speed", "troupe", "ratio", 0.9), Goal("latency, ms", "troupe", "p99, ms", 5.0, most=True, digits=1)),
)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the benchmark left its file: half as fast as the baseline, at 4 ms."""
    monkeypatch.setattr(suite, "RECORDED", tmp_path)
    slow = [Turn(2.0, 10.0, 1.0, 0.5, figures={"p99, ms": wait}) for wait in (4.0, 4.5)]
    fast = [Turn(1.0, 10.0, 1.0, 0.0)] * 2
    Report("one", {}, {"bare": fast, "troupe": slow}, "bare", {}).write(tmp_path / "one.json")
    return tmp_path


def test_the_table_says_what_is_met_and_what_was_measured_beside_other_load(left: Path) -> None:
    speed, latency = table([ONE]).splitlines()[2:4]
    assert speed.startswith("| speed | 0.500 (0.500 .. 0.500) | at least 0.9 | missed | **0.50 (0.50 .. 0.50)** |")
    assert speed.endswith("| `python -m benchmarks.one --turns 2` |")
    assert latency.startswith("| latency, ms | 4.2 (4.0 .. 4.5) | at most 5 | met |")
    assert "cores of" in table([ONE]) and ": one" in table([ONE])


def test_unmeasured_goals_are_listed_as_such(left: Path) -> None:
    (left / "one.json").unlink()
    assert all("not measured" in line for line in table([ONE]).splitlines()[2:4])


def test_a_goal_without_a_measurement_is_an_error(left: Path) -> None:
    document = json.loads((left / "one.json").read_text())
    with pytest.raises(KeyError):
        figure_of(document, Goal("x", "troupe", "p50, ms", 1.0))


def test_a_ratio_to_another_contender_than_the_baseline_is_taken_turn_by_turn(left: Path) -> None:
    document = json.loads((left / "one.json").read_text())
    assert figure_of(document, Goal("x", "bare", "ratio", 1.0, over="troupe")).median == 2.0


def test_the_page_is_written_between_its_marks_and_again(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "table", lambda: "new")
    page = left / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_page(page)
        assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no marks"):
        write_page(page)


def test_the_docs_have_the_table_of_what_is_recorded() -> None:
    text = suite.PAGE.read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table().strip()


def test_every_benchmark_has_a_file_of_its_own() -> None:
    assert len({benchmark.name for benchmark in SUITE}) == len(SUITE)
    assert Benchmark("one", (), ()).name == "one"
    assert Benchmark("one", (), (), "two").name == "one-two"


@pytest.mark.parametrize("benchmark", SUITE, ids=lambda one: one.name)
def test_commands_are_understood_and_recorded_figures_are_there(benchmark: Benchmark) -> None:
    importlib.import_module(f"benchmarks.{benchmark.module}").parse(benchmark.arguments)
    if (document := suite.recorded(benchmark)) is not None:
        assert all(figure_of(document, goal).median > 0 for goal in benchmark.goals)

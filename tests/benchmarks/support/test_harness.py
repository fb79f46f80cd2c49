"""Turns, statistics and reports of the benchmark harness."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.support import harness
from benchmarks.support.code_state import CodeState
from benchmarks.support.harness import (
    GIGABYTES,
    SEQUENCES,
    SKIPPED,
    Report,
    Spread,
    Turn,
    Unfit,
    best,
    ratios,
    rotated,
    run_benchmark,
    take_turns,
)


def turn(tokens: int, seconds: float = 1.0, **phases: float) -> Turn:
    return Turn(seconds, tokens, 2.0 * seconds, 0.25, phases)


def test_spread_is_median_least_and_greatest() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread.of([1.0]).text(1) == "1.0 (1.0 .. 1.0)"
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_every_contender_comes_first_equally_often() -> None:
    orders = [rotated(["a", "b", "c"], n) for n in range(6)]
    assert orders[1] == ["b", "c", "a"]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]


async def test_turns_alternate_and_the_first_is_discarded() -> None:
    seen: list[tuple[str, int]] = []

    def contender(name: str):
        async def take(number: int) -> Turn:
            seen.append((name, number))
            return turn(number)

        return take

    taken = await take_turns({name: contender(name) for name in "ab"}, 2)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [figures.amount for figures in taken["a"]] == [1, 2]


def test_ratios_compare_turns_of_the_same_round() -> None:
    # The machine slows down to a third: throughputs scatter, ratios do not.
    fast, slow = [turn(100), turn(30)], [turn(50), turn(15)]
    assert ratios(slow, fast) == [0.5, 0.5]
    with pytest.raises(ValueError, match="argument"):
        ratios(slow, fast[:1])
    assert best({"x": fast, "y": slow, "z": [turn(1000)]}, ["x", "y"]) == "x"


def test_report_shows_and_writes_every_figure(tmp_path: Path) -> None:
    taken = {"bare": [turn(100, update=0.5), turn(120, update=0.7)], "troupe": [turn(90), turn(120)]}
    report = Report("name", taken, "bare", {"tokens": "equal"}, arguments={"model": Path("m")})
    written = json.loads(report.write(tmp_path / "results" / "one.json").read_text())
    assert [figures["amount"] for figures in written["turns"]["troupe"]] == [90, 120]
    assert written["summary"]["troupe"]["ratio"] == {"median": 0.95, "low": 0.9, "high": 1.0}
    assert written["summary"]["bare"]["phases"]["update"]["median"] == pytest.approx(0.6)
    assert written["checks"] == {"tokens": "equal"} and written["arguments"] == {"model": "m"}
    assert written["machine"]["cores"] >= 1 and "torch" in written["versions"]
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    text = console.export_text()
    assert "0.950 (0.900 .. 1.000)" in text and "checked: tokens: equal" in text and "update" in text
    assert "tokens/s" in text and "CPU ms/token" in text and "other measurements" not in text


def test_report_counts_in_the_benchmarks_unit() -> None:
    taken = {"memcpy": [Turn(0.5, 4.0, 0.5, 0.0)], "put": [Turn(1.0, 4.0, 2.0, 0.0, figures={"copies per byte": 1.25})]}
    report = Report("name", taken, "memcpy", {}, GIGABYTES)
    assert report.summary()["put"]["GB_per_s"].median == 4.0
    assert report.summary()["put"]["cpu_ms_per_GB"].median == 500.0
    assert Report("name", taken, "memcpy", {}, SEQUENCES).summary()["put"]["cpu_us_per_sequence"].median == 5e5
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    text = console.export_text()
    assert "GB/s" in text and "4.00 (4.00 .. 4.00)" in text and "1.250 (1.250 .. 1.250)" in text


@pytest.mark.parametrize("changes", [False, True])
def test_results_of_code_that_changed_meanwhile_are_of_no_state_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    before, after = CodeState("one", "1a2b", dirty=False), CodeState("two", "1a2b", dirty=True)
    states = iter([before, after if changes else before])
    monkeypatch.setattr(harness, "code_state", lambda: next(states))
    given = Namespace(json=tmp_path / "one.json", groups=2, size=0)
    report = Report("name", {"bare": [turn(1)]}, "bare", {}, arguments={"size": 8})
    run_benchmark(lambda _: given, lambda _: report)
    written = json.loads((tmp_path / "one.json").read_text())
    assert CodeState(**written["code"]) == (CodeState("", "1a2b", dirty=True) if changes else before)
    assert written["elapsed_s"] >= 0.0 and written["arguments"] == {"groups": 2, "size": 8}


def test_a_machine_that_cannot_run_a_benchmark_skips_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def measure(given: Namespace) -> Report:
        raise Unfit("it has one core")

    with pytest.raises(SystemExit) as ended:
        run_benchmark(lambda _: Namespace(json=None), measure)
    assert ended.value.code == SKIPPED and capsys.readouterr().out == "skipped: it has one core\n"

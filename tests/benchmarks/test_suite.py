"""The suite: what runs, and its table of goals against what benchmarks recorded."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import suite
from benchmarks.suite import SUITE
from benchmarks.support import records, suite_page
from benchmarks.support.code_state import UNKNOWN, CodeState
from benchmarks.support.goals import Benchmark, Goal, figure_of
from benchmarks.support.harness import Report, Turn
from benchmarks.support.records import Row, columns, fitting, note_command, recorded, row_of
from benchmarks.support.suite_page import BEGIN, END, table, write_page

ONE = Benchmark(
    "one",
    ("--turns", "2"),
    (Goal("speed", "troupe", "ratio", 0.9), Goal("latency, ms", "troupe", "p99, ms", 5.0, most=True, digits=1)),
)
TWO = replace(ONE, variant="two", estimate_s=70)
CODE = CodeState("digest", "1a2b3c4d", dirty=False, benchmark="modules")
NEW = replace(CODE, digest="another", commit="5e6f7a8b")
HERE, THERE = "amd-epyc-2-cores", "some-xeon-8-cores"


def leave(folder: Path, benchmark: Benchmark, kind: str, code: CodeState = CODE, **changes: object) -> Path:
    """Leave results in a folder: half as fast as the baseline, at 4 ms, after 90 s."""
    slow = [Turn(2.0, 10.0, 1.0, 0.5, figures={"p99, ms": wait}) for wait in (4.0, 4.5)]
    fast = [Turn(1.0, 10.0, 1.0, 0.0)] * 2
    report = Report("one", {"bare": fast, "troupe": slow}, "bare", {})
    path = report.write(records.path_of(benchmark, kind, folder), code, 90.0)
    document = json.loads(path.read_text())
    document["machine"] |= {"cpu": "Some CPU", "cores": 2}
    document["command"] = benchmark.command
    path.write_text(json.dumps(document | changes))
    return path


def test_the_table_says_what_is_met_and_what_was_measured_beside_other_load(tmp_path: Path) -> None:
    leave(tmp_path, ONE, HERE)
    heads, _, speed, latency = table([ONE], columns([ONE], tmp_path)).splitlines()[:4]
    assert heads == "| what | goal | Some CPU, 2 threads, 1a2b3c4d | GPU | command |"
    found = "0.500 (0.500 .. 0.500), missed, **0.50 cores**"
    assert speed == f"| speed | at least 0.9 | {found} | not measured | `python -m benchmarks.one --turns 2` |"
    assert latency.startswith("| latency, ms | at most 5 | 4.2 (4.0 .. 4.5), met, **0.50 cores** |")


def test_each_kind_of_machine_has_a_column_and_never_the_results_of_another(tmp_path: Path) -> None:
    leave(tmp_path, ONE, HERE)
    leave(tmp_path, TWO, THERE, NEW)
    here, there = columns([ONE, TWO], tmp_path)
    assert (here.kind, there.kind) == (HERE, THERE)
    assert list(here.found) == ["one"] and list(there.found) == ["one-two"]
    one, two = (table([ONE, TWO], [here, there]).splitlines()[row].split(" | ") for row in (2, 4))
    assert one[2].startswith("0.500") and one[3] == "not measured"
    assert two[2] == "not measured" and two[3].startswith("0.500")


def test_measurements_of_older_code_than_the_newest_of_their_column_are_marked(tmp_path: Path) -> None:
    leave(tmp_path, ONE, HERE, CODE, time="2026-11-20T10:00:00+00:00")
    leave(tmp_path, TWO, HERE, NEW, time="2026-11-21T10:00:00+00:00")
    text = table([ONE, TWO], columns([ONE, TWO], tmp_path))
    older, newer = (text.splitlines()[row].split(" | ")[2] for row in (2, 4))
    assert older.endswith(" †") and not newer.endswith(" †")
    assert "2 threads, 5e6f7a8b" in text.splitlines()[0]
    assert "- 1a2b3c4d †; 2 cores of Some CPU, 2026-11-20" in text
    assert "- 5e6f7a8b; 2 cores of Some CPU, 2026-11-21" in text


def test_measurements_that_do_not_name_their_code_are_marked_even_as_the_newest(tmp_path: Path) -> None:
    path = leave(tmp_path, ONE, HERE)
    document = json.loads(path.read_text())
    del document["code"]
    path.write_text(json.dumps(document))
    text = table([ONE], columns([ONE], tmp_path))
    assert text.splitlines()[2].split(" | ")[2].endswith(" †") and "- code not named †; 2 cores" in text


def test_unmeasured_goals_are_listed_as_such(tmp_path: Path) -> None:
    lines = table([ONE], columns([ONE], tmp_path)).splitlines()
    assert all(line.split(" | ")[2] == "not measured" for line in lines[2:4])


def test_a_goal_without_a_measurement_is_an_error_in_results_of_the_same_code_only(tmp_path: Path) -> None:
    wanted = replace(ONE, goals=(Goal("x", "troupe", "p50, ms", 1.0),))
    leave(tmp_path, ONE, HERE, CODE, time="2026-11-20T10:00:00+00:00")
    with pytest.raises(KeyError):
        table([wanted], columns([wanted], tmp_path))
    leave(tmp_path, TWO, HERE, NEW, time="2026-11-21T10:00:00+00:00")
    assert " | not measured | not measured | " in table([wanted], columns([wanted, TWO], tmp_path))


def test_a_ratio_to_another_contender_than_the_baseline_is_taken_turn_by_turn(tmp_path: Path) -> None:
    document = json.loads(leave(tmp_path, ONE, HERE).read_text())
    assert figure_of(document, Goal("x", "bare", "ratio", 1.0, over="troupe")).median == 2.0


def test_only_results_of_the_same_code_and_machine_are_recorded(tmp_path: Path) -> None:
    assert row_of(ONE, HERE, CODE, tmp_path) == Row(ONE, "missing", 600, measured=False)
    leave(tmp_path, ONE, HERE)
    assert row_of(ONE, HERE, CODE, tmp_path) == Row(ONE, "recorded", 90.0, measured=True)
    assert row_of(ONE, HERE, replace(CODE, commit="a merge of equal files"), tmp_path).state == "recorded"
    assert row_of(ONE, HERE, NEW, tmp_path).state == "stale"
    assert row_of(ONE, HERE, replace(CODE, benchmark="changed"), tmp_path).state == "stale"
    assert row_of(ONE, HERE, UNKNOWN, tmp_path).state == "stale"
    assert row_of(ONE, THERE, CODE, tmp_path) == Row(ONE, "missing", 90.0, measured=True)  # seconds of the other kind


def test_results_of_another_command_are_stale_and_marked(tmp_path: Path) -> None:
    leave(tmp_path, ONE, HERE)
    changed = replace(ONE, arguments=("--turns", "5"))
    assert row_of(changed, HERE, CODE, tmp_path).state == "stale"
    marked = table([changed], columns([changed], tmp_path)).splitlines()[2].split(" | ")[2]
    assert marked.endswith(" †")
    note_command(changed, HERE, tmp_path)
    assert row_of(changed, HERE, CODE, tmp_path).state == "recorded"


def test_the_command_is_noted_where_it_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leave(tmp_path, ONE, HERE, command="")
    monkeypatch.setattr(suite, "note_command", lambda one, kind: note_command(one, kind, tmp_path))
    for code, noted in ((1, ""), (0, ONE.command)):
        monkeypatch.setattr(suite.subprocess, "run", lambda *_, code=code, **__: SimpleNamespace(returncode=code))
        assert suite.run(ONE, HERE) == (code == 0)
        assert json.loads(path.read_text())["command"] == noted


def test_results_of_a_command_that_was_cut_short_are_stale(tmp_path: Path) -> None:
    leave(tmp_path, TWO, HERE, elapsed_s=None)
    assert row_of(TWO, HERE, CODE, tmp_path) == Row(TWO, "stale", 70, measured=False)


def test_a_piece_takes_the_first_benchmark_that_ends_in_time() -> None:
    long, short = (Row(ONE, "missing", seconds, measured=True) for seconds in (900.0, 60.0))
    assert fitting([long, short], 1000.0) is long
    assert fitting([long, short], 100.0) is short
    assert fitting([long, short], 59.0) is None and fitting([], 1e9) is None


def test_pieces_skip_what_is_recorded_and_report_what_they_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    names = ("quick", "broken", "long")
    quick, broken, long = (Benchmark(name, (), (), estimate_s=60 if name != "long" else 9000) for name in names)
    monkeypatch.setattr(suite, "SUITE", (quick, broken, long))
    monkeypatch.setattr(suite, "write_page", lambda _: None)
    monkeypatch.setattr(suite, "run", lambda one, _: ran.append(one.name) or one is not broken)
    rows = [row_of(one, HERE, CODE, tmp_path) for one in (quick, broken, long)]
    assert suite.measure(rows, HERE, 1800.0) == (["broken"], ["long"])
    assert ran == ["quick", "broken"]
    assert suite.measure([], HERE, float("inf")) == ([], [])


def test_a_second_call_measures_nothing_that_the_first_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for module in (suite, suite_page):
        monkeypatch.setattr(module, "write_page", lambda _: None)
    monkeypatch.setattr(suite, "SUITE", (ONE, TWO))
    monkeypatch.setattr(suite, "code_state", lambda: CODE)
    monkeypatch.setattr(suite, "of_benchmark", lambda _, code: code)
    monkeypatch.setattr(suite, "kind_of", lambda _: HERE)
    monkeypatch.setattr(suite, "row_of", lambda one, kind, code: row_of(one, kind, code, tmp_path))
    monkeypatch.setattr(suite, "run", lambda one, kind: ran.append(one.name) or bool(leave(tmp_path, one, kind)))
    for arguments, expected in (["suite"], ["one", "one-two"]), (["suite"], []), (["suite", "--again"], ["one"]):
        monkeypatch.setattr("sys.argv", [*arguments, *(["--only", "one"] if "--again" in arguments else [])])
        ran.clear()
        assert suite.main() == 0
        assert ran == expected


def test_the_list_says_what_is_left_and_for_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, ONE, HERE)
    suite.show([row_of(one, HERE, CODE, tmp_path) for one in (ONE, TWO)], HERE, CODE)
    text = capsys.readouterr().out
    assert "1a2b3c4d" in text and "70 (estimate)" in text and "1 recorded; 1 to measure, about 1 minutes" in text


def test_the_page_is_written_between_its_marks_and_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_page("new", page)
        assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no marks"):
        write_page("new", page)


def test_the_docs_have_the_table_of_what_is_recorded() -> None:
    text = suite_page.PAGE.read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(SUITE, columns(SUITE)).strip()


def test_every_benchmark_has_a_file_of_its_own() -> None:
    assert len({benchmark.name for benchmark in SUITE}) == len(SUITE)
    assert (ONE.name, TWO.name) == ("one", "one-two")


@pytest.mark.parametrize("benchmark", SUITE, ids=lambda one: one.name)
def test_commands_are_understood_and_recorded_figures_are_there(benchmark: Benchmark) -> None:
    importlib.import_module(f"benchmarks.{benchmark.module}").parse(benchmark.arguments)
    for column in columns([benchmark]):
        found = recorded(benchmark, column.kind)
        assert found is not None
        known = [goal for goal in benchmark.goals if not column.older(benchmark.name) or goal.over in ("", "TRL")]
        assert all(figure_of(found.document, goal).median > 0 for goal in known)

"""The table of docs/explanation/benchmarks.md: a row for each goal, a column for each kind of machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.code_state import ROOT
from benchmarks.support.goals import Benchmark, Goal, figure_of
from benchmarks.support.harness import Spread, where
from benchmarks.support.records import Column, Recorded

PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"
BEGIN, END = "<!-- measured: python -m benchmarks.suite --page -->", "<!-- end of measured -->"
MORE_LOAD = 0.2
"""Other load, in cores, above which a measurement says so."""
OLDER = "†"
MISSING = "not measured"
_NOTES = (
    "Median (least .. greatest) of the turns, and whether the median meets the goal. "
    f"{OLDER}: measured with other code of the product than the newest measurements of the column, with another "
    "command, or with code that the results do not name. Bold: beside so many cores of other load. "
    "No benchmark was measured on a GPU."
)


def table(benchmarks: Sequence[Benchmark], columns: Sequence[Column]) -> str:
    """The Markdown table, what its marks mean, and where each measurement was made."""
    heads = ["what", "goal", *(f"{one.machine}, {one.newest.code.text}" for one in columns), "GPU", "command"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for benchmark in benchmarks:
        for goal in benchmark.goals:
            cells = [_cell(benchmark.name, goal, column) for column in columns]
            lines.append(_line([goal.what, goal.text, *cells, MISSING, f"`{benchmark.command}`"]))
    return "\n".join([*lines, "", _NOTES, "", *_places(columns)])


def write_page(text: str, page: Path = PAGE) -> None:
    """Replace the table between the marks of the page. Raises ValueError where the page has no marks."""
    old = page.read_text()
    if BEGIN not in old or END not in old:
        raise ValueError(f"{page} has no marks for the table: add the lines {BEGIN} and {END}")
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(name: str, goal: Goal, column: Column) -> str:
    """One measurement: the spread, whether it meets the goal, and its marks."""
    if name not in column.found:
        return MISSING
    document = column.found[name].document
    try:
        found = figure_of(document, goal)
    except KeyError:  # a goal, or a contender, that is newer than these results
        if not column.older(name):
            raise
        return MISSING
    load = Spread(**document["summary"][goal.contender]["foreign_cores"]).median
    loaded = f", **{load:.2f} cores**" if load > MORE_LOAD else ""
    mark = f" {OLDER}" if column.older(name) else ""
    return f"{found.text(goal.digits)}, {'met' if goal.met(found.median) else 'missed'}{loaded}{mark}"


def _places(columns: Sequence[Column]) -> list[str]:
    """A line for each kind of machine, code, day and versions, with the benchmarks that it measured."""
    lines: list[str] = []
    for column in columns:
        places = {name: _place(one, column.older(name)) for name, one in column.found.items()}
        for place in dict.fromkeys(places.values()):
            lines.append(f"- {place}: {', '.join(name for name, own in places.items() if own == place)}")
    return lines


def _place(one: Recorded, older: bool) -> str:
    place = where(one.document["machine"], one.document["versions"], one.day)
    return f"{one.code.text}{f' {OLDER}' if older else ''}; {place}"

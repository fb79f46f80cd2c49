"""The table of faults in the docs, from what the last runs of `tests/faults/test_faults.py` saw."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import ROOT
from tests.faults import stalls
from tests.faults.injected import Outcome

RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "explanation" / "faults.md"
BEGIN, END = "<!-- measured: make test-faults -->", "<!-- end of measured -->"


def record(outcome: Outcome) -> None:
    """Keep an outcome for the table; the row of the same fault is replaced."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    rows[outcome.fault] = vars(outcome)
    RESULTS.write_text(json.dumps(rows, indent=1))


def table() -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| fault | outcome | found after, s | recovered after, s | lost samples | left behind |",
        "|---|---|---|---|---|---|",
    ]
    for row in json.loads(RESULTS.read_text()).values():
        outcome = Outcome(**row)
        seconds = ("" if s is None else f"{s:.1f}" for s in (outcome.found_s, outcome.recovered_s))
        said = outcome.outcome if outcome.ok else f"**{outcome.outcome}**"
        lines.append(
            f"| {outcome.fault} | {said} | {' | '.join(seconds)} | {outcome.lost_samples} | {outcome.left_behind} |"
        )
    return "\n".join(lines)


def write_page() -> None:
    """Write the table between its marks in the docs."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    write_page()
    stalls.write_page()

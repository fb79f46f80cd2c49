"""The table of faults in the docs, from what the last runs of `tests/faults/test_faults.py` saw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.faults import stalls
from tests.faults.containers import CONTAINERS, Container
from tests.faults.injected import Outcome

RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "explanation" / "faults.md"
_DAMAGE = "not run: no process is lost, as with a byte flipped"
NOT_RUN = {f"newest checkpoint: {damage}": _DAMAGE for damage in ("truncated", "a file missing", "a file added")}
"""What the table says of faults for which PID 1 makes no difference, where they were not injected without an init."""
BEGIN, END = "<!-- measured: make test-faults -->", "<!-- end of measured -->"


def record(container: Container, outcome: Outcome) -> None:
    """Keep an outcome for the table; the one of the same fault in the same container is replaced."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    rows.setdefault(outcome.fault, {})[str(container)] = vars(outcome)
    RESULTS.write_text(a_line_each(rows))


def a_line_each(rows: Mapping[str, Any]) -> str:
    """The rows as JSON, one on each line."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}\n"


def table() -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| fault | outcome | found after, s | recovered after, s | lost samples | left behind | without an init |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in json.loads(RESULTS.read_text()).values():
        reaped, unreaped = (Outcome(**row[str(one)]) if str(one) in row else None for one in CONTAINERS)
        assert reaped is not None
        cells = (reaped.fault, _said(reaped), *_seconds(reaped), reaped.lost_samples, reaped.left_behind)
        lines.append(f"| {' | '.join(map(str, (*cells, _beside(reaped, unreaped))))} |")
    return "\n".join(lines)


def _said(outcome: Outcome) -> str:
    """What it led to; bold where that is wrong."""
    return outcome.outcome if outcome.ok else f"**{outcome.outcome}**"


def _seconds(outcome: Outcome) -> list[str]:
    """Until it was found, until the run had recovered."""
    return ["" if seconds is None else f"{seconds:.1f}" for seconds in (outcome.found_s, outcome.recovered_s)]


def _beside(reaped: Outcome, unreaped: Outcome | None) -> str:
    """The outcome without an init: the same, with its seconds, or what is not the same."""
    if unreaped is None:
        return NOT_RUN.get(reaped.fault, "not run")
    same = [(one.outcome, one.lost_samples, one.left_behind, one.ok) for one in (reaped, unreaped)]
    seconds = " / ".join(filter(None, _seconds(unreaped)))
    said = "the same" if same[0] == same[1] else f"{_said(unreaped)}; left behind: {unreaped.left_behind}"
    return f"{said}, {seconds} s" if seconds else said


def write_page() -> None:
    """Write the table between its marks in the docs."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    write_page()
    stalls.write_page()

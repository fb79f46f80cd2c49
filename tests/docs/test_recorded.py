"""The pages on samples and timeline list exactly the columns that are written, and the events that are recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from troupe.orchestrator.telemetry.timeline import PHASES, TIMELINE
from troupe.workers.contract.samples import SAMPLES

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDES = ROOT / "docs" / "guides"
_ROW = re.compile(r"\| `(\w+)` \| ([\w ]+) \| .+ \|")
_RECORDED = re.compile(r'\.record\(\s*"(\w+)"|event = "(\w+)" if .+ else "(\w+)"')


def described(kind: pa.DataType) -> str:
    """A type in the words of the pages."""
    if pa.types.is_list(kind):
        return "list of struct" if pa.types.is_struct(kind.value_type) else f"list of {kind.value_type}"
    return str(kind)


@pytest.mark.parametrize(("page", "schema"), [("samples.md", SAMPLES), ("timeline.md", TIMELINE)])
def test_the_page_lists_exactly_the_columns_in_their_order(page: str, schema: pa.Schema) -> None:
    found = _ROW.findall((GUIDES / page).read_text())
    assert found == [(field.name, described(field.type)) for field in schema]


def test_the_page_names_every_phase() -> None:
    (line,) = (line for line in (GUIDES / "timeline.md").read_text().splitlines() if line.startswith("| `phase`"))
    assert re.findall(r"`(\w+)`", line)[1:] == list(PHASES)


def test_the_page_lists_exactly_the_events_that_are_recorded() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "orchestrator").rglob("*.py"))
    recorded = {name for names in _RECORDED.findall(code) for name in names if name}
    rows = (GUIDES / "timeline.md").read_text().partition("| event | fields |")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == recorded

"""Write the table of planted faults into the guide of the audit: `python -m docs.tooling.write_audit_table`.

The metrics come from the tests:
`TROUPE_AUDIT_RESULTS=docs/tooling/audit_faults.json make ARGS=tests/real/test_audit.py test-long`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "tooling" / "audit_faults.json"
GUIDE = ROOT / "docs" / "guides" / "audit.md"
BEGIN, END = "<!-- faults: python -m docs.tooling.write_audit_table -->", "<!-- end of faults -->"


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of the recorded rows, in their order."""
    lines = [
        "| model | planted fault | engine | policy | rounding | the audit says |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        metrics = " | ".join(f"{row[name]:.1e}" for name in ("sampler", "trainer", "rounding"))
        lines.append(f"| {row['model']} | {row['fault']} | {metrics} | {_verdict(row)} |")
    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    """The findings without their remedies."""
    if row["passed"]:
        return "passed"
    return "; ".join(finding.partition("; ")[0].replace("|", "\\|").replace("\n", " ") for finding in row["findings"])


def written(guide: str, rows: list[dict[str, Any]]) -> str:
    """The guide with the table between its two marks."""
    before, _, rest = guide.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}"


def main() -> None:
    """Write the guide."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    GUIDE.write_text(written(GUIDE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The page of `troupe bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from troupe.orchestrator.reporting.html.page import BENCH_SCRIPTS, render_page
from troupe.workers.contract.atomic_file import write_atomic


def write_page(record: dict[str, Any], output: Path) -> Path:
    """Write the page of a benchmark.

    Args:
        record: The results (`orchestrator/bench/record.py`).
        output: The file. It is replaced as a whole.

    Returns:
        The file. Raises OSError where it cannot be written.
    """
    text = render_page(record, title=f"{record['name']} - Troupe bench", scripts=BENCH_SCRIPTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, text)
    return output

"""Write the rows of the matrices after a change of their factors: `python -m tests.pairs.record`."""

from __future__ import annotations

import json
import sys

from tests.pairs.features import ROWS
from tests.pairs.matrices import MATRICES


def main() -> None:
    """Write the rows."""
    rows = {matrix.name: [", ".join(row.values()) for row in matrix.covering_rows()] for matrix in MATRICES}
    ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{ {name: len(found) for name, found in rows.items()} }\n")


if __name__ == "__main__":
    main()

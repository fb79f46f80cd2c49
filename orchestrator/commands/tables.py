"""Widths of the tables that commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

UNBOUNDED = 1000
"""Width of output that goes to no terminal."""


def output_width() -> int | None:
    """Width for standard output, or None for the terminal's, or COLUMNS."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBOUNDED


def natural_width(table: Table) -> int:
    """Columns that a table takes if there is room enough."""
    return Console(width=UNBOUNDED).measure(table).maximum

"""Rows that cannot be used, or that the spec leaves out."""

from __future__ import annotations


class BadRow(ValueError):
    """A row that cannot be used; the message gives the reason."""


class SkippedRow(Exception):
    """A row that the spec leaves out; the message names the kind of such rows."""


class WrongForm(BadRow):
    """A row with a value that the spec's reading of a column excludes: no row of the source can be trusted."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        """The field of the source's section that names the column."""

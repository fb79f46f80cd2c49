"""What belongs to the rows of a pool in which several sources follow each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RowTable(Generic[T]):
    """One entry for each source, found by the number of a row."""

    starts: tuple[int, ...]
    """First row of each source, ascending from 0."""
    entries: tuple[T, ...]

    @classmethod
    def of(cls, sizes: Iterable[int], entries: Iterable[T]) -> RowTable[T]:
        """The table of sources with these numbers of rows."""
        return cls((0, *accumulate(sizes))[:-1], tuple(entries))

    def __getitem__(self, row: int) -> T:
        """The entry of the source that has the row."""
        return self.entries[bisect_right(self.starts, row) - 1]

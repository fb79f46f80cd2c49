"""The texts of PPO-ptx (arXiv 2203.02155), which the policy trains on besides its rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from troupe.orchestrator.data.bad_rows import BadRow
from troupe.orchestrator.data.conversations import require_whole
from troupe.orchestrator.data.mixture import PromptMixture
from troupe.orchestrator.data.pools import OnBadRow, Pool, collect, of_sources
from troupe.orchestrator.data.prompts import PromptOrder, PromptSource
from troupe.orchestrator.data.readers import RawValues, read_table
from troupe.orchestrator.spec.sections import DataConfig
from troupe.orchestrator.spec.sources import SourceShare, TextSource
from troupe.workers.contract.roles import TableRef

_SCHEMA = pa.schema([pa.field("text", pa.string(), nullable=False), pa.field("origin", pa.string(), nullable=False)])


def load_texts(data: DataConfig, on_bad_row: OnBadRow) -> Pool | None:
    """Read the texts of `data.ptx`; several sources one after another. None if there are none. Raises DataError if a
    source cannot be read, a row is bad with `stop`, or no row of a source is left."""
    return None if data.ptx is None else of_sources(data.ptx, "data.ptx", partial(_load, on_bad_row))


def _load(on_bad_row: OnBadRow, source: TextSource, section: str) -> Pool:
    """The texts of a source; columns `text` and `origin` ("file.jsonl:17")."""
    rows = read_table(source, {"text": source.text}, section)
    found = collect(rows, lambda raw: _row(raw, source.text), section, on_bad_row)
    table = pa.Table.from_pylist(found.rows, schema=_SCHEMA)
    return found.pool(table, (row["text"].encode() for row in found.rows))


def _row(raw: RawValues, column: str) -> dict[str, str]:
    text = raw.values.get(column)
    if not isinstance(text, str) or not text.strip():
        raise BadRow("the text is empty or not text")
    require_whole(text, "the text")
    return {"text": text, "origin": raw.origin}


@dataclass(frozen=True)
class TextPicks:
    """Pieces of text that the policy trains on with a batch."""

    table: TableRef
    tokens: tuple[int, ...]
    """Length of every piece of the table, in tokens."""
    rows: tuple[int, ...]
    """The pieces picked."""


@dataclass(frozen=True)
class SourcePieces:
    """The pieces of one of several sources."""

    share: SourceShare
    """Its name, and as weight the pieces that a step trains on."""
    rows: int
    digest: str


@dataclass(frozen=True)
class Pieces:
    """The texts as tokens, cut in pieces."""

    table: TableRef
    tokens: tuple[int, ...]
    """Length of every piece, in tokens."""
    digest: str
    """Digest of the texts' content."""
    parts: tuple[SourcePieces, ...] = ()
    """The sources in the order of their rows; empty if there is one."""

    @property
    def rows(self) -> int:
        return len(self.tokens)


class TextOrder:
    """The pieces of text for each step, in an order set by the seed; resumable."""

    def __init__(self, pieces: Pieces, per_step: int, seed: int) -> None:
        self._pieces = pieces
        self._per_step = per_step
        # Weights are whole numbers that add up to `per_step`: of each source, every step has as many as its weight.
        shares = [part.share for part in pieces.parts]
        self._order: PromptOrder = (
            PromptMixture(pieces.parts, shares, seed, section="data.ptx") if shares else PromptSource(pieces, seed)
        )
        self._state = self._order.state()

    def pick(self) -> TextPicks:
        rows = tuple(self._order.next().row for _ in range(self._per_step))
        return TextPicks(self._pieces.table, self._pieces.tokens, rows)

    def mark_trained(self) -> None:
        """Advance the saved order past the last picked pieces, which are trained now."""
        self._state = self._order.state()

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        self._order.restore(state)
        self._state = self._order.state()

"""The texts of PPO-ptx (arXiv 2203.02155), which the policy trains on beside its rollouts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from troupe.orchestrator.data.conversations import BadRow, require_whole
from troupe.orchestrator.data.prompts import MAX_REPORTED, DataError, Pool, PromptSource
from troupe.orchestrator.data.readers import read_table
from troupe.orchestrator.spec.sections import TextSource
from troupe.workers.contract.roles import TableRef

_SCHEMA = pa.schema([pa.field("text", pa.string(), nullable=False), pa.field("origin", pa.string(), nullable=False)])


class TextPool(Pool):
    """Texts; columns `text` and `origin` ("file.jsonl:17")."""


def load_texts(source: TextSource, on_bad_row: Literal["skip", "stop"]) -> TextPool:
    """Read the texts. Raises DataError: the source cannot be read, a row is bad with `stop`, or no row is left."""
    rows: list[dict[str, str]] = []
    problems: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    for raw in read_table(source, {"text": source.text}, "data.ptx"):
        try:
            text = _text(raw.error, raw.values.get(source.text))
        except BadRow as bad:
            if on_bad_row == "stop":
                raise DataError(f"{raw.origin}: {bad}") from None
            problems.append(f"{raw.origin}: {bad}")
            continue
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        rows.append({"text": text, "origin": raw.origin})
    if not rows:
        why = f"no row can be used ({len(problems)} bad; the first: {problems[0]})" if problems else "there are no rows"
        raise DataError(f"data.ptx: {why}")
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    return TextPool(table, digest.hexdigest(), len(problems), tuple(problems[:MAX_REPORTED]))


def _text(error: str, value: Any) -> str:
    if error:
        raise BadRow(error)
    if not isinstance(value, str) or not value.strip():
        raise BadRow("the text is empty or not text")
    require_whole(value, "the text")
    return value


@dataclass(frozen=True)
class TextPicks:
    """Pieces of text that the policy trains on beside a batch."""

    table: TableRef
    tokens: tuple[int, ...]
    """Length of every piece of the table, in tokens."""
    rows: tuple[int, ...]
    """The pieces picked."""


@dataclass(frozen=True)
class Pieces:
    """The texts as tokens, cut in pieces."""

    table: TableRef
    tokens: tuple[int, ...]
    """Length of every piece, in tokens."""
    digest: str
    """Digest of the texts' content."""

    @property
    def rows(self) -> int:
        """Number of pieces."""
        return len(self.tokens)


class TextOrder:
    """The pieces that each step trains on, in an order that the seed decides; resumable."""

    def __init__(self, pieces: Pieces, per_step: int, seed: int) -> None:
        self._pieces = pieces
        self._per_step = per_step
        self._order = PromptSource(pieces, seed)
        self._state = self._order.state()

    def pick(self) -> TextPicks:
        """The pieces of the next step."""
        rows = tuple(self._order.next().row for _ in range(self._per_step))
        return TextPicks(self._pieces.table, self._pieces.tokens, rows)

    def mark_trained(self) -> None:
        """Advance the saved order past the last picked pieces, which are trained now."""
        self._state = self._order.state()

    def state(self) -> dict[str, Any]:
        """Position in the order after the last trained step, JSON-ready."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position that `state` returned. Raises DataError where the texts or the seed differ."""
        self._order.restore(state)
        self._state = self._order.state()

"""The second data set of PPO-ptx: texts that the policy goes on to learn while it is rewarded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from orchestrator.batch_source import TextPicks
from orchestrator.handles import TableRef
from orchestrator.prompts import MAX_REPORTED, BadRow, DataError, Pool, PromptSource, require_whole
from orchestrator.prompts_readers import read_table
from orchestrator.spec_sections import TextSource

_SCHEMA = pa.schema([pa.field("text", pa.string(), nullable=False), pa.field("origin", pa.string(), nullable=False)])


class TextPool(Pool):
    """Texts; columns `text` and `origin` ("file.jsonl:17")."""


def load_texts(source: TextSource, on_bad_row: Literal["skip", "stop"]) -> TextPool:
    """Read the texts. Raises DataError: the source cannot be read, a bad row with `stop`, or no row is left."""
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
        raise BadRow("the text is empty or no text")
    require_whole(value, "the text")
    return value


@dataclass(frozen=True)
class Pieces:
    """The texts as tokens, cut in pieces, as their order sees them."""

    table: TableRef
    tokens: tuple[int, ...]
    """Of every piece."""
    digest: str
    """Of what the texts say."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.tokens)


class TextOrder:
    """Which pieces each step learns, in the order of the seed; resumable."""

    def __init__(self, pieces: Pieces, per_step: int, seed: int) -> None:
        self._pieces = pieces
        self._per_step = per_step
        self._order = PromptSource(pieces, seed)
        self._state = self._order.state()

    def pick(self) -> TextPicks:
        """The next step's."""
        rows = tuple(self._order.next().row for _ in range(self._per_step))
        return TextPicks(self._pieces.table, self._pieces.tokens, rows)

    def trained(self) -> None:
        """What was picked last is learnt; only now does the saved order move on."""
        self._state = self._order.state()

    def state(self) -> dict[str, int | str]:
        """JSON-ready: the order after the last trained step."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state` was taken. Raises DataError where the texts or the seed are others."""
        self._order.restore(state)
        self._state = self._order.state()

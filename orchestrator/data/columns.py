"""Columns by name, also those inside a struct: `reward_model.ground_truth`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from troupe.orchestrator.errors import DataError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

Tree = Mapping[str, Any]
"""Columns of a row or of a file by name; a struct is a nested tree; None if it is unknown whether it is a struct or a
value."""

_SHOWN = 20
_SYNONYMS = {"response": "completion", "prompt": "messages", "messages": "conversations"}
"""Names of other layouts for a column."""


def find_column(row: Tree, name: str) -> Any:
    """Value of a column of a row.

    A column of exactly this name comes first. Otherwise a dot leads into a struct; a struct that is null has null
    values.

    Raises:
        KeyError: The row has no such column.
    """
    if name in row:
        return row[name]
    end = name.rfind(".")
    while end > 0:
        outer, inner = name[:end], name[end + 1 :]
        if outer in row and row[outer] is None:
            return None
        if isinstance(struct := row.get(outer), Mapping):
            try:
                return find_column(struct, inner)
            except KeyError:
                pass
        end = name.rfind(".", 0, end)
    raise KeyError(name)


def require_columns(fields: Mapping[str, str] | None, label: str, where: str, there: Tree) -> None:
    """Raise DataError for a source without the columns that the spec names.

    Args:
        fields: Column of each field of the source's section of the spec, or None if no column is needed.
        label: Path of that section (`data.train`).
        where: The file, for the message.
        there: Its columns.
    """
    for field, column in (fields or {}).items():
        try:
            find_column(there, column)
        except KeyError:
            raise DataError(_missing(f"{label}.{field}", column, where, there)) from None


def _missing(field: str, column: str, where: str, there: Tree) -> str:
    names = list(_names(there))
    listed = ", ".join(names[:_SHOWN]) or "none"
    # No distance between words leads from `ground_truth` to `reward_model.ground_truth`, or to TRL's `completion`.
    known = [name for name in names if name.endswith(f".{column}") or name == _SYNONYMS.get(column)]
    hint = f"did you mean '{known[0]}'?" if known else nearest(column, names)
    if column == "prompt" and {"chosen", "rejected"} <= set(names):
        hint = "null: the prompt is the common beginning of the answers"
    words = f"{where}: no column '{column}' ({field}); columns there: {listed}"
    return f"{words} ({hint})" if hint else words


def _names(there: Tree, prefix: str = "") -> Iterator[str]:
    """Every name that a spec can give, a struct's fields instead of the struct."""
    for name, inner in there.items():
        if isinstance(inner, Mapping) and inner:
            yield from _names(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def arrow_columns(schema: pa.Schema | pa.StructType) -> Tree:
    """The columns of an Arrow table."""
    import pyarrow as pa

    columns = [schema.field(index) for index in range(len(schema.names))]
    return {field.name: arrow_columns(field.type) if pa.types.is_struct(field.type) else "" for field in columns}

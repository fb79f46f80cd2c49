"""Shows samples in the terminal: as conversations with their rewards, or as a table.

Text of a model or of data is hostile: it is shown as it is, never read as markup, and its control characters are
written as escapes.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from rich import box
from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

CONVERSATION_COLUMNS = (
    *("step", "prompt_uid", "sample_index", "segment", "messages", "conversation", "response", "answer"),
    *("status", "reward", "components", "finish_reason", "response_ids", "loss_mask", "weight_versions", "trained"),
    *("advantages", "player"),
)
"""What `show_samples` needs."""
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories of characters that steer a terminal or change how other text is shown."""
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_LONGEST_CELL = 80
"""Characters of a cell of a table."""


def visible(text: str) -> str:
    """The text with escapes instead of control, format and unassigned characters, except line feeds and tabs."""
    return "".join(char if char in "\n\t" else _escaped(char) for char in text.replace("\r\n", "\n"))


def _escaped(char: str) -> str:
    if unicodedata.category(char) not in _INVISIBLE:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def show_samples(console: Console, table: pa.Table) -> None:
    """Prints every sample as its conversation, below a line with what is known about it."""
    for row in table.to_pylist():
        console.print(_heading(row))
        console.print(Rule(characters="─", style="dim"))
        for part in _conversation(row):
            console.print(part)
        console.print()


def show_table(console: Console, table: pa.Table) -> None:
    """Prints rows as a table; long values are cut."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field in table.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        shown.add_column(Text(field.name), justify="right" if numeric else "left", overflow="fold")
    for row in table.to_pylist():
        shown.add_row(*(Text(_cell(value)) for value in row.values()))
    console.print(shown)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and value and all(isinstance(entry, int | float) for entry in value):
        return f"{len(value)} values, mean {sum(value) / len(value):.4g}"
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    line = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= _LONGEST_CELL else f"{line[: _LONGEST_CELL - 3]}..."


def _heading(row: Mapping[str, Any]) -> Text:
    segment = f".{row['segment']}" if row["segment"] else ""
    player = f"  {row['player']}" if row["player"] else ""
    parts = [
        Text(f"step {row['step']}", "bold"),
        Text(visible(f"{row['prompt_uid']}[{row['sample_index']}]{segment}{player}"), "bold"),
        _reward(row),
        *_sizes(row),
    ]
    return Text("  ").join(parts)


def _reward(row: Mapping[str, Any]) -> Text:
    if row["reward"] is None:
        return Text(f"no reward: {visible(str(row['status']))}", "red")
    parts = [f"{visible(one['name'])} {_number(one['value'])}" for one in row["components"] or ()]
    components = f" ({', '.join(parts)})" if parts else ""
    return Text(f"reward {_number(row['reward'])}{components}", "green" if row["reward"] > 0 else "yellow")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _sizes(row: Mapping[str, Any]) -> Iterable[Text]:
    if row["advantages"]:
        weights = [a for a, own in zip(row["advantages"], row["loss_mask"] or (), strict=False) if own]
        if weights:
            yield Text(f"advantage {sum(weights) / len(weights):+.3g}")
    if row["trained"] is False:
        yield Text("not trained", "red")
    yield Text(f"{len(row['response_ids'] or ())} tokens, {visible(str(row['finish_reason']))}", "dim")
    versions = sorted({span["version"] for span in row["weight_versions"] or ()})
    if versions:
        yield Text(f"version {', '.join(map(str, versions))}", "dim")
    if row["answer"]:
        yield Text(f"answer {_cell(row['answer'])}", "dim")


def _conversation(row: Mapping[str, Any]) -> Iterable[RenderableType]:
    """The messages of the prompt and the response, or the episode's messages."""
    episode = _messages(row["conversation"])
    messages = episode or [*_messages(row["messages"]), {"role": "assistant", "content": row["response"]}]
    for message in messages:
        role = str(message.get("role", "?"))
        yield Text(visible(role), _ROLE_STYLES.get(role, "blue") + " bold")
        content = message.get("content")
        yield Text(visible(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)))
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        if rest:
            yield Text(visible(json.dumps(rest, ensure_ascii=False)), "dim")


def _messages(text: str | None) -> Sequence[Mapping[str, Any]]:
    """The messages of a column with JSON; a text that is none is shown as it is."""
    if not text:
        return ()
    try:
        found = json.loads(text)
    except ValueError:
        return ({"role": "user", "content": text},)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else ()

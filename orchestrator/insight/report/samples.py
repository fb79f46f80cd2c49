"""Texts of tokens by id, from the run's tokenizer, once for each id."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from troupe.workers.isolation.probe import ProbeFailed, ask

_TIMEOUT_S = 60.0
LONGEST_TEXT = 20_000
"""Characters of a prompt or response that the page keeps; the store has the rest."""
LONGEST_TOKENS = 4096
"""Tokens of a response with colours."""
_LEVELS = 254
"""Steps of a quantised token value; 0 stands for a missing one."""
Json = dict[str, Any]
_SCALARS = (
    *("prompt_uid", "sample_index", "attempt", "segment", "messages", "conversation", "response", "answer"),
    *(
        "finish_reason",
        "status",
        "reward",
        "components",
        "source",
        "engine",
        "generate_s",
        "weight_versions",
        "trained",
    ),
)


class TokenTexts:
    """The vocabulary of a run, as far as its samples use it."""

    def __init__(self, model: Mapping[str, Any], retry_s: float = math.inf) -> None:
        """`retry_s`: seconds in which nothing is asked after a failed question; never again by default."""
        self.model = dict(model)
        self._retry_s = retry_s
        self._ask_at = 0.0 if model else math.inf
        """No question before this, by the monotonic clock."""
        self._known: dict[int, str] = {}
        self.problem = "" if model else "the run has no spec.yaml with a model"
        """Why there are no texts; empty if there are."""

    def learn(self, ids: Iterable[int]) -> None:
        """Reads the texts of ids that are not known yet; sets `problem` if that fails, else clears it."""
        wanted = sorted(set(ids) - self._known.keys())
        if not wanted or time.monotonic() < self._ask_at:
            return
        try:
            texts = ask("troupe.workers.data.tokenizer_probe:decode", {"model": self.model, "ids": wanted}, _TIMEOUT_S)[
                0
            ]
        except (ProbeFailed, IndexError, OSError) as error:
            self.problem = getattr(error, "raised", "") or str(error)
            self._ask_at = time.monotonic() + self._retry_s
            return
        self.problem = ""
        self._known |= dict(zip(wanted, texts, strict=True))

    def __getitem__(self, token: int) -> str:
        """The text of a token; its id in angle brackets if it is not known."""
        return self._known.get(token, f"<{token}>")

    def __bool__(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class TokenColumn:
    """One value for each response token of a table: flat values and the offsets of the rows."""

    flat: np.ndarray
    offsets: np.ndarray

    def row(self, number: int) -> np.ndarray:
        return self.flat[self.offsets[number] : self.offsets[number + 1]]

    @classmethod
    def of(cls, table: pa.Table, name: str) -> TokenColumn | None:
        """A list column of numbers, or None if the table does not have it or has only nulls."""
        if name not in table.column_names or table[name].null_count == table.num_rows:
            return None
        column = table[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        lengths = np.asarray(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
        flat = np.asarray(column.flatten().to_numpy(zero_copy_only=False), np.float64)
        return cls(flat, np.concatenate([[0], np.cumsum(lengths)]))


def step_block(table: pa.Table, step: int, texts: TokenTexts) -> Json:
    """One step's samples, ready for the page. `texts`: texts of tokens; the step's are added here."""
    rows = table.num_rows
    plain = _plain(table)
    prompts, prompt_of = _distinct(plain["messages"])
    block: Json = {
        "step": step,
        "prompts": [_messages(text) for text in prompts],
        "prompt": prompt_of,
        "group": plain["prompt_uid"],
        "sample": plain["sample_index"],
        "segment": plain["segment"],
        "attempt": plain["attempt"],
        "response": [_cut(text) for text in plain["response"]],
        "conversation": [_messages(text) if text else None for text in plain["conversation"]],
        "answer": [_cut(text, 400) for text in plain["answer"]],
        "finish": plain["finish_reason"],
        "status": [_cut(text, 400) for text in plain["status"]],
        "reward": [_number(value) for value in plain["reward"]],
        "components": _components(plain["components"], rows),
        "source": plain["source"],
        "engine": plain["engine"],
        "seconds": [_number(value) for value in plain["generate_s"]],
        "trained": plain["trained"],
        "versions": [
            [[span["version"], span["start"], span["end"]] for span in spans or ()]
            for spans in plain["weight_versions"]
        ],
    }
    return block | _tokens(table, rows, texts)


def _plain(table: pa.Table) -> dict[str, list[Any]]:
    """The columns without token arrays as lists; a missing column is all null."""
    names = set(table.column_names)
    return {name: table[name].to_pylist() if name in names else [None] * table.num_rows for name in _SCALARS}


def _distinct(values: Iterable[Any]) -> tuple[list[str], list[int]]:
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(str(value or ""), len(numbers)) for value in values]
    return list(numbers), places


def _messages(text: str) -> list[list[str]]:
    """(role, content) of every message of a JSON list; text that is none is one message."""
    try:
        found = json.loads(text)
        messages = [[str(m.get("role", "")), _cut(_content(m))] for m in found]
    except (ValueError, AttributeError, TypeError):
        return [["", _cut(text)]]
    return messages


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, with the tools that it calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}".strip() if calls else text


def _cut(text: str | None, longest: int = LONGEST_TEXT) -> str:
    if text is None or len(text) <= longest:
        return text or ""
    return f"{text[:longest]}\n[... {len(text) - longest:,} more characters are in the samples' file]"


def _number(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _components(rows: list[list[Json] | None], count: int) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {}
    for number, row in enumerate(rows):
        for component in row or ():
            columns.setdefault(component["name"], [None] * count)[number] = _number(component["value"])
    return columns


def _tokens(table: pa.Table, rows: int, texts: TokenTexts) -> Json:
    """Tokens and their values, and of every sample how surprising it was."""
    sampled = TokenColumn.of(table, "rollout_logprobs")
    mask = TokenColumn.of(table, "loss_mask")
    ids = TokenColumn.of(table, "response_ids")
    lengths = [int(n) for n in np.diff(ids.offsets)] if ids is not None else [0] * rows
    block: Json = {"length": lengths, "surprise": [None] * rows, "gap": [None] * rows}
    if sampled is not None:
        block["surprise"] = [_mean(-sampled.row(i), None if mask is None else mask.row(i)) for i in range(rows)]
    gap = _gap(table, sampled)
    if gap is not None:
        block["gap"] = [_mean(np.abs(gap.row(i)), None if mask is None else mask.row(i)) for i in range(rows)]
    if ids is None or ids.flat.size == 0:
        return block
    distinct, numbers = np.unique(ids.flat.astype(np.int64), return_inverse=True)
    texts.learn(int(token) for token in distinct)
    if not texts:
        return block
    width = np.uint16 if len(distinct) < 2**16 else np.uint32
    block["vocabulary"] = [texts[int(token)] for token in distinct]
    block["wide"] = width is np.uint32
    block["tokens"] = [_encoded(row.astype(width)) for row in _rows(TokenColumn(numbers.reshape(-1), ids.offsets))]
    values = {
        "advantage": TokenColumn.of(table, "advantages"),
        "gap": gap,
        "entropy": TokenColumn.of(table, "entropy"),
        "value": TokenColumn.of(table, "values"),
        "probability": None if sampled is None else TokenColumn(np.exp(sampled.flat), sampled.offsets),
    }
    block["values"] = {name: _quantised(found) for name, found in values.items() if found is not None}
    if mask is not None and not mask.flat.all():
        block["mask"] = [_encoded(row.astype(np.uint8)) for row in _rows(mask)]
    return block


def _gap(table: pa.Table, sampled: TokenColumn | None) -> TokenColumn | None:
    """The sampler's log-prob of each token less the trainer's, before the update if that was computed."""
    if sampled is None:
        return None
    for name in ("old_logprobs", "logprobs"):
        trainer = TokenColumn.of(table, name)
        if trainer is None:
            continue
        flat = np.full(sampled.flat.size, np.nan)
        for i in range(len(sampled.offsets) - 1):
            if len(trainer.row(i)) == len(sampled.row(i)):
                flat[sampled.offsets[i] : sampled.offsets[i + 1]] = sampled.row(i) - trainer.row(i)
        return TokenColumn(flat, sampled.offsets)
    return None


def _mean(values: np.ndarray, mask: np.ndarray | None) -> float | None:
    if mask is not None and len(mask) == len(values):
        values = values[mask.astype(bool)]
    values = values[np.isfinite(values)]
    return _number(float(values.mean())) if values.size else None


def _rows(values: TokenColumn) -> Iterable[np.ndarray]:
    return (values.row(i)[:LONGEST_TOKENS] for i in range(len(values.offsets) - 1))


def _quantised(values: TokenColumn) -> Json:
    """Values in 254 equal steps between the least and the largest; a row of equal values is one number."""
    finite = values.flat[np.isfinite(values.flat)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    scale = _LEVELS / (high - low) if high > low else 0.0
    # Missing values become low and then level 0.
    levels = np.where(np.isfinite(values.flat), 1 + np.rint((np.nan_to_num(values.flat, nan=low) - low) * scale), 0)
    rows: list[str | float | None] = []
    for row in _rows(TokenColumn(levels.astype(np.uint8), values.offsets)):
        if row.size and (row == row[0]).all():
            rows.append(None if row[0] == 0 else _number(low + (int(row[0]) - 1) / scale if scale else low))
        else:
            rows.append(_encoded(row))
    return {"low": _number(low), "high": _number(high), "rows": rows}


def _encoded(row: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(row).tobytes()).decode("ascii")

"""The pool of examples for offline training: demonstrations, pairs, ranked or labelled answers, checked by row."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from orchestrator.algorithms.offline import DataFormat
from orchestrator.data.prompts import MAX_REPORTED, BadRow, DataError, Pool, chat_messages, require_whole
from orchestrator.data.readers import read_table
from orchestrator.spec.offline import ExampleSource, OfflineSpec, columns, data_format
from workers.contract.offline_messages import EXAMPLE_TEXTS


class ExamplePool(Pool):
    """Examples; schema `workers.contract.offline_messages.EXAMPLE_TEXTS`."""


@dataclass(frozen=True)
class _Example:
    responses: list[str]
    scores: list[float] = field(default_factory=list)
    margin: float = 0.0
    desirable: bool = True


def load_examples(spec: OfflineSpec) -> tuple[ExamplePool, ExamplePool | None]:
    """The pools for training and (None without `data.eval`) for evaluation. Raises DataError."""
    data = spec.data
    train = load_pool(spec, data.train, "data.train")
    if data.eval is None:
        return train, None
    return train, load_pool(spec, data.eval, "data.eval", without=train if data.held_out else None)


def load_pool(spec: OfflineSpec, source: ExampleSource, label: str, without: ExamplePool | None = None) -> ExamplePool:
    """Read a source into a pool; `failures.on_bad_row` says what an unusable row does.

    Args:
        spec: The spec.
        source: The source's section of the spec.
        label: Path of that section, for error messages.
        without: Exclude the prompts of this pool.

    Raises:
        DataError: The source cannot be read, a row is bad with `stop`, or no row is left.
    """
    taken = frozenset(without.table.column("messages").to_pylist()) if without is not None else frozenset()
    format_ = data_format(spec, source)
    fields = columns(format_, source)
    builder = _PoolBuilder()
    for raw in read_table(source, fields, label):
        try:
            if raw.error:
                raise BadRow(raw.error)
            values = {name: raw.values[column] for name, column in fields.items()}
            messages = json.dumps(chat_messages(values["prompt"], source), ensure_ascii=False)
            example = _READERS[format_](values)
            _check_texts(messages, example, source.max_chars)
        except BadRow as bad:
            builder.refuse(f"{raw.origin}: {bad}", stop=spec.failures.on_bad_row == "stop")
            continue
        if messages in taken:
            builder.left_out += 1
        else:
            builder.add(messages, example, raw.origin)
    return builder.pool(label)


@dataclass
class _PoolBuilder:
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bad_rows: int = 0
    left_out: int = 0

    def add(self, messages: str, example: _Example, origin: str) -> None:
        self.rows.append({"messages": messages, **vars(example), "origin": origin})

    def refuse(self, problem: str, *, stop: bool) -> None:
        if stop:
            raise DataError(problem)
        self.bad_rows += 1
        if len(self.problems) < MAX_REPORTED:
            self.problems.append(problem)

    def pool(self, label: str) -> ExamplePool:
        if not self.rows:
            raise DataError(f"{label}: {self._why_empty()}")
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            content = json.dumps({name: value for name, value in row.items() if name != "origin"}).encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        table = pa.Table.from_pylist(self.rows, schema=EXAMPLE_TEXTS)
        return ExamplePool(table, digest.hexdigest(), self.bad_rows, tuple(self.problems), self.left_out)

    def _why_empty(self) -> str:
        if self.left_out:
            return "every prompt is also in the training data (data.held_out)"
        if self.bad_rows:
            return f"no row can be used ({self.bad_rows} bad; the first: {self.problems[0]})"
        return "there are no rows"


def _demonstration(values: Mapping[str, Any]) -> _Example:
    return _Example([_text(values["response"], "response")])


def _pair(values: Mapping[str, Any]) -> _Example:
    chosen, rejected = _text(values["chosen"], "chosen answer"), _text(values["rejected"], "rejected answer")
    if chosen == rejected:
        raise BadRow("the chosen and the rejected answer are the same")
    return _Example([chosen, rejected], margin=_number(values["margin"], "margin") if "margin" in values else 0.0)


def _ranked(values: Mapping[str, Any]) -> _Example:
    answers = values["answers"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise BadRow("the answers are not a list of two or more texts")
    texts = [_text(answer, f"answer {number}") for number, answer in enumerate(answers)]
    if len(set(texts)) < len(texts):
        raise BadRow("two answers are the same")
    if "scores" not in values:
        return _Example(texts)
    given = values["scores"]
    if not isinstance(given, list) or len(given) != len(texts):
        raise BadRow(f"the scores are not a list of {len(texts)} numbers, one per answer")
    scores = [_number(score, f"score {number}") for number, score in enumerate(given)]
    if len(set(scores)) < 2:
        raise BadRow("every answer has the same score: there is nothing to rank")
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return _Example([texts[place] for place in order], [scores[place] for place in order])


def _labelled(values: Mapping[str, Any]) -> _Example:
    label = values["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise BadRow(f"the label is neither true nor false: {label!r:.60}")
    return _Example([_text(values["response"], "response")], desirable=bool(label))


_READERS: Mapping[DataFormat, Callable[[Mapping[str, Any]], _Example]] = {
    "demonstrations": _demonstration,
    "pairs": _pair,
    "ranked": _ranked,
    "labelled": _labelled,
}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"the {what} is not text")
    if not value.strip():
        raise BadRow(f"the {what} is empty")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"the {what} is not a finite number: {value!r:.60}")
    return float(value)


def _check_texts(messages: str, example: _Example, max_chars: int) -> None:
    for text in (messages, *example.responses):
        require_whole(text, "a text")
    longest = max(map(len, example.responses))
    if longest > max_chars:
        raise BadRow(f"a response has {longest} characters, more than max_chars {max_chars}")

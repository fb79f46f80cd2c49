"""The pool of examples for offline training: demonstrations, pairs, ranked or labelled answers, checked by row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from troupe.orchestrator.algorithms.offline import DataFormat
from troupe.orchestrator.data.conversations import (
    BadRow,
    Message,
    characters,
    chat_messages,
    is_whole,
    require_template,
    require_whole,
    response_turns,
    split_answers,
    split_conversation,
)
from troupe.orchestrator.data.pools import Pool, Repeats, collect, of_sources, prompts_of
from troupe.orchestrator.data.readers import RawValues, read_table
from troupe.orchestrator.spec.offline import OfflineSpec, columns, data_format
from troupe.orchestrator.spec.sources import ExampleSource
from troupe.workers.contract.offline_messages import EXAMPLE_TEXTS


@dataclass(frozen=True)
class _Form:
    """What a row's form depends on besides its format."""

    last: bool
    """Only the last turn of a conversation is a response."""
    plain: bool
    """There is no chat template: everything is text."""


@dataclass(frozen=True)
class _Example:
    prompt: Any
    responses: list[list[Message]]
    scores: list[float] = field(default_factory=list)
    margin: float = 0.0
    desirable: bool = True


def load_examples(spec: OfflineSpec) -> tuple[Pool, Pool | None]:
    """The pools for training and (None without `data.eval`) for evaluation. Raises DataError."""
    data = spec.data
    train = of_sources(data.train, "data.train", lambda source, label: load_pool(spec, source, label))
    if data.eval is None:
        return train, None
    return train, load_pool(spec, data.eval, "data.eval", without=train if data.held_out else None)


def load_pool(spec: OfflineSpec, source: ExampleSource, label: str, without: Pool | None = None) -> Pool:
    """Read a source into a pool with schema EXAMPLE_TEXTS; `failures.on_bad_row` sets what an unusable row does.

    Args:
        spec: The spec.
        source: The source's section of the spec.
        label: Path of that section, for error messages.
        without: Exclude the prompts of this pool.

    Raises:
        DataError: The source cannot be read, a row is bad with `stop`, or no row is left.
    """
    taken = prompts_of(without)
    format_ = data_format(spec, source)
    fields = columns(format_, source)
    form = _Form(source.loss_on == "last", spec.model.plain)

    def read(raw: RawValues) -> dict[str, Any]:
        example = _READERS[format_]({name: raw.values[column] for name, column in fields.items()}, form)
        messages = _json(chat_messages(example.prompt, source, plain=form.plain))
        responses = [_json(turns) for turns in example.responses]
        _check_texts([messages, *responses], example, source.max_chars)
        labels = {"scores": example.scores, "margin": example.margin, "desirable": example.desirable}
        return {"messages": messages, "responses": responses, **labels, "origin": raw.origin, "source": None}

    found = collect(
        read_table(source, fields, label),
        read,
        label,
        spec.failures.on_bad_row,
        lambda row: row["messages"] in taken,
        Repeats(lambda row: json.dumps([row["messages"], *row["responses"]]), source.dedupe),
    )
    unread = ("origin", "source")
    contents = (json.dumps({name: value for name, value in row.items() if name not in unread}) for row in found.rows)
    table = pa.Table.from_pylist(found.rows, schema=EXAMPLE_TEXTS)
    return found.pool(table, map(str.encode, contents))


def _demonstration(values: Mapping[str, Any], form: _Form) -> _Example:
    prompt, turns = _response(values, form)
    return _Example(prompt, [turns])


def _pair(values: Mapping[str, Any], form: _Form) -> _Example:
    names = ("chosen answer", "rejected answer")
    prompt, turns = _answers(values, (values["chosen"], values["rejected"]), names, form)
    if turns[0] == turns[1]:
        raise BadRow("the chosen and the rejected answer are the same")
    return _Example(prompt, turns, margin=_number(values["margin"], "margin") if "margin" in values else 0.0)


def _ranked(values: Mapping[str, Any], form: _Form) -> _Example:
    answers = values["answers"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise BadRow("the answers are not a list of two or more texts")
    prompt, turns = _answers(values, answers, [f"answer {number}" for number in range(len(answers))], form)
    if len(set(map(_json, turns))) < len(turns):
        raise BadRow("two answers are the same")
    if "scores" not in values:
        return _Example(prompt, turns)
    given = values["scores"]
    if not isinstance(given, list) or len(given) != len(turns):
        raise BadRow(f"the scores are not a list of {len(turns)} numbers, one per answer")
    scores = [_number(score, f"score {number}") for number, score in enumerate(given)]
    if len(set(scores)) < 2:
        raise BadRow("every answer has the same score: there is nothing to rank")
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return _Example(prompt, [turns[place] for place in order], [scores[place] for place in order])


def _labelled(values: Mapping[str, Any], form: _Form) -> _Example:
    label = values["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise BadRow(f"the label is neither true nor false: {label!r:.60}")
    prompt, turns = _response(values, form)
    return _Example(prompt, [turns], desirable=bool(label))


def _response(values: Mapping[str, Any], form: _Form) -> tuple[Any, list[Message]]:
    """Prompt and response, each in a separate column or both in one."""
    if "messages" not in values:
        return values["prompt"], response_turns(values["response"], "response", plain=form.plain)
    require_template(form.plain)
    return split_conversation(values["messages"], last=form.last)


def _answers(
    values: Mapping[str, Any], answers: Sequence[Any], names: Sequence[str], form: _Form
) -> tuple[Any, list[list[Message]]]:
    """Prompt and responses; the prompt of whole conversations is their common beginning."""
    if "prompt" not in values or any(map(is_whole, answers)):
        require_template(form.plain)
        return split_answers(answers, names)
    pairs = zip(answers, names, strict=True)
    return values["prompt"], [response_turns(answer, name, plain=form.plain) for answer, name in pairs]


_READERS: Mapping[DataFormat, Callable[[Mapping[str, Any], _Form], _Example]] = {
    "demonstrations": _demonstration,
    "pairs": _pair,
    "ranked": _ranked,
    "labelled": _labelled,
}


def _json(messages: Sequence[Message]) -> str:
    return json.dumps(messages, ensure_ascii=False)


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"the {what} is not a finite number: {value!r:.60}")
    return float(value)


def _check_texts(texts: Sequence[str], example: _Example, max_chars: int) -> None:
    for text in texts:
        require_whole(text, "a text")
    longest = max(map(characters, example.responses))
    if longest > max_chars:
        raise BadRow(f"a response has {longest} characters, more than max_chars {max_chars}")

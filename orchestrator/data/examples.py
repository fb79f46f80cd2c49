"""The pool of examples for offline training: demonstrations, pairs, ranked or labelled answers, checked by row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import pyarrow as pa

from troupe.orchestrator.algorithms.offline import DataFormat
from troupe.orchestrator.data.bad_rows import BadRow, SkippedRow, WrongForm
from troupe.orchestrator.data.calls import is_calls, tool_schemas
from troupe.orchestrator.data.conversations import (
    Message,
    characters,
    chat_messages,
    is_whole,
    marked_steps,
    require_template,
    require_whole,
    response_turns,
    split_answers,
    split_conversation,
    spoken_turns,
)
from troupe.orchestrator.data.pools import Pool, Repeats, asked_in, collect, compared, of_sources
from troupe.orchestrator.data.preferences import doubts
from troupe.orchestrator.data.readers import RawValues, read_table, without_nulls
from troupe.orchestrator.data.samples import sample_reader
from troupe.orchestrator.data.step_trees import branches
from troupe.orchestrator.spec.offline import OfflineSpec, columns, data_format
from troupe.orchestrator.spec.sources import NEGATIVE, ExampleSource, Preferred
from troupe.workers.contract.offline_messages import EXAMPLE_TEXTS

_LOOKED_AT = 1000
"""Rows whose unread columns are compared with the order of the answers."""


@dataclass(frozen=True)
class _Form:
    """What a row's form depends on besides its format."""

    source: ExampleSource
    plain: bool
    """There is no chat template: everything is text."""

    @property
    def signed_margin(self) -> bool:
        """Whether the margin is the number whose sign says which answer is better."""
        preferred = self.source.preferred
        return preferred is not None and preferred.signed and self.source.margin == preferred.column


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
    """Read a source into a pool with schema EXAMPLE_TEXTS, `without` the prompts of another. Raises DataError if it
    cannot be read, a row is bad with `on_bad_row: stop`, or none is left."""
    is_asked = asked_in(without)
    format_ = data_format(spec.row.formats, source)
    fields, sampled = columns(format_, source), format_ == "samples"
    found = collect(
        as_examples(source, read_table(source, None if sampled else fields, label, arrays=sampled)),
        sample_reader(spec, source) if sampled else example_reader(source, format_, plain=spec.model.plain),
        label,
        spec.failures.on_bad_row,
        lambda row: is_asked(row["messages"], ""),
        Repeats(lambda row: f"{row['tools']} {row['messages']} {_said(row)}", source.dedupe, _said),
    )
    contents = (
        json.dumps({name: value for name, value in row.items() if name != "origin" and value is not None}, default=_hex)
        for row in found.rows
    )
    table = pa.Table.from_pylist(found.rows, schema=EXAMPLE_TEXTS)
    pool = found.pool(table, map(str.encode, contents))
    if "chosen" not in fields:
        return pool
    looked_at = islice(read_table(source, None, label), _LOOKED_AT)
    rows = [row.values for row in looked_at if not row.error and not row.left_out]
    return replace(pool, doubts=tuple(doubts(source.chosen, source.rejected, rows)))


def _ways(source: ExampleSource, row: RawValues) -> Iterator[RawValues]:
    """A row for each way through its tree of steps."""
    if row.error or row.left_out:
        yield row
        return
    try:
        ways = list(branches(row.values[source.steps]))
    except BadRow as bad:
        yield replace(row, error=str(bad))
        return
    if not ways:
        yield replace(row, error="no step has a rating")
    yield from (replace(row, values=row.values | {source.steps: way}) for way in ways)


def _hex(values: np.ndarray) -> str:
    return values.tobytes().hex()


def _said(row: Mapping[str, Any]) -> str:
    """The responses of an example with their labels, as examples are compared."""
    labels = (str(row[name]) for name in ("scores", "margin", "desirable"))
    return compared(" ".join([*row["responses"], *labels]))


def example_reader(source: ExampleSource, format_: DataFormat, *, plain: bool) -> Callable[[RawValues], dict[str, Any]]:
    """Reads a row of a source in this format as EXAMPLE_TEXTS has it; raises BadRow and SkippedRow."""
    fields = columns(format_, source)
    form = _Form(source, plain)

    def read(raw: RawValues) -> dict[str, Any]:
        values = {name: raw.values[column] for name, column in fields.items()}
        values = _gathered({name: without_nulls(one) for name, one in values.items()} if raw.padded else values)
        example = _READERS[format_](values, form)
        tools = tool_schemas(values.get("tools"))
        messages = _json(chat_messages(example.prompt, source, values.get("system_column"), plain=plain))
        responses = [_json(turns) for turns in example.responses]
        offered = json.dumps(tools, ensure_ascii=False) if tools else None
        _check_texts([messages, *responses, offered or ""], example, source.max_chars)
        labels = {"scores": example.scores, "margin": example.margin, "desirable": example.desirable}
        own = {"tools": offered, "origin": raw.origin, "source": None}
        return {"messages": messages, "responses": responses, **labels, **own}

    return read


def as_examples(source: ExampleSource, rows: Iterable[RawValues]) -> Iterator[RawValues]:
    """The rows of a source, those of `one_in_a_row` joined to lists, trees of steps once for each way through."""
    if source.step_labels is None:
        yield from chain.from_iterable(_ways(source, row) for row in rows)
        return
    if not source.one_in_a_row:
        yield from rows
        return
    shared, left_out = {source.prompt, source.system_column, source.tools}, list[RawValues]()

    def used() -> Iterator[RawValues]:
        for row in rows:
            if row.left_out:
                left_out.append(row)
            else:
                yield row

    def asked(row: RawValues) -> str:
        own = row.values.items()
        return (row.error and row.origin) or json.dumps([one for name, one in own if name in shared], default=str)

    for _, same in groupby(used(), asked):
        first, *others = same
        joined = {
            name: value if name in shared else [row.values[name] for row in (first, *others)]
            for name, value in first.values.items()
        }
        yield replace(first, values=joined)
    yield from left_out


def _demonstration(values: Mapping[str, Any], form: _Form) -> _Example:
    prompt, turns = _response(values, form)
    return _Example(prompt, [turns])


def _gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the values of several columns (`scores.0`, `scores.1`) into one list (`scores`)."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        field_, _, number = name.partition(".")
        if number.isdigit():
            found.setdefault(field_, []).append(value)
        else:
            found[name] = value
    return found


def _pair(values: Mapping[str, Any], form: _Form) -> _Example:
    """The better and the worse answer; of several, the best and the worst."""
    if "chosen" in values:
        names = ("chosen answer", "rejected answer")
        prompt, turns = _answers(values, (values["chosen"], values["rejected"]), names, form)
        if turns[0] == turns[1]:
            raise BadRow("the chosen and the rejected answer are the same")
        best_first, strength = [0, 1], 0.0
    else:
        prompt, turns, scores, best_first = _in_order(values, form)
        strength = scores[best_first[0]] - scores[best_first[-1]] if scores else 0.0
        turns = [turns[best_first[0]], turns[best_first[-1]]]
    margin = _margin(values["margin"], best_first, form) if "margin" in values else 0.0
    if (margin if "margin" in values else strength) < form.source.min_margin:
        raise SkippedRow(f"pairs with a margin below {form.source.min_margin:g}")
    return _Example(prompt, turns, margin=margin)


def _margin(value: Any, best_first: Sequence[int], form: _Form) -> float:
    """How much better the better answer is. Raises BadRow, WrongForm."""
    if isinstance(value, list):  # of the answers, in their order in the data
        numbers = _numbers(value, "margin", len(best_first))
        margin = numbers[best_first[0]] - numbers[best_first[-1]]
    else:
        margin = _number(value, "margin")
    if form.signed_margin:
        return abs(margin)
    if margin < 0:
        raise WrongForm(
            "margin", f"the margin is {margin:g}, so that the answer that is read as better is the worse one"
        )
    return margin


def _ranked(values: Mapping[str, Any], form: _Form) -> _Example:
    prompt, turns, scores, best_first = _in_order(values, form)
    return _Example(prompt, [turns[place] for place in best_first], [scores[place] for place in best_first if scores])


def _in_order(values: Mapping[str, Any], form: _Form) -> tuple[Any, list[list[Message]], list[float], Sequence[int]]:
    """Prompt and answers, their scores (empty if the order in the data is theirs), and their places, best first."""
    answers = values["answers"]
    if form.source.one_in_a_row and len(answers) == 1:
        raise SkippedRow("prompts with one answer")
    if not isinstance(answers, list) or len(answers) < 2:
        raise BadRow("the answers are not a list of two or more texts")
    prompt, turns = _answers(values, answers, [f"answer {number}" for number in range(len(answers))], form)
    if len(set(map(_json, turns))) < len(turns):
        raise BadRow("two answers are the same")
    scores = _scores(values, form, len(turns))
    if scores and len(set(scores)) < 2:
        raise SkippedRow("ties")
    places = range(len(turns))
    return prompt, turns, scores, sorted(places, key=lambda place: -scores[place]) if scores else places


def _scores(values: Mapping[str, Any], form: _Form, count: int) -> list[float]:
    """A number for each answer, the best one's the highest; empty if the answers are in order. Raises BadRow."""
    if form.source.preferred is not None:
        if count != 2:
            raise BadRow(f"{count} answers; preferred says which of two is better")
        strength = _strength(values["preferred.column"], form.source.preferred)
        return [max(strength, 0.0), max(-strength, 0.0)]
    for name, sign in (("scores", 1.0), ("ranks", -1.0)):
        if name in values:
            return [sign * number for number in _numbers(values[name], name[:-1], count)]
    return []


def _strength(value: Any, preferred: Preferred) -> float:
    """How much better the first answer is, or minus how much the second one is. Raises BadRow, WrongForm."""
    if _is_missing(value):
        raise BadRow(f"{preferred.column} is empty")
    if preferred.signed:
        return _number(value, preferred.column) * (-1.0 if preferred.first == NEGATIVE else 1.0)
    strength = next((strength for known, strength in preferred.strengths if _word(known) == _word(value)), None)
    if strength is None:
        raise WrongForm("preferred", f"{preferred.column} is {value!r:.60}, which is none of first, second and ties")
    return strength


def _is_missing(value: Any) -> bool:
    """Whether a value is null, empty, or NaN, as which pandas writes a missing one."""
    return value is None or value == "" or value != value


def _word(value: Any) -> str:
    """A value in the form in which CSV has it too: 1, 1.0 and "1" are equal, and so are true and "True"."""
    return re.sub(r"(?<=\d)\.0+$", "", str(value).strip().lower())


_LABELS: Mapping[str, bool] = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _labelled(values: Mapping[str, Any], form: _Form) -> _Example:
    label = values["label"]
    if _is_missing(label):
        raise BadRow("the label is empty")
    desirable = _LABELS.get(_word(label))
    if desirable is None:
        raise WrongForm("label", f"the label is neither true nor false, 1 nor 0, yes nor no: {label!r:.60}")
    prompt, turns = _response(values, form)
    return _Example(prompt, [turns], desirable=desirable)


def _in_steps(values: Mapping[str, Any], form: _Form) -> _Example:
    """The steps of a response, each as a response, with their labels as scores."""
    prompt, steps, labels = values.get("prompt"), values["steps"], values.get("step_labels")
    if form.source.step_labels is None:
        labels = [_rating(rating, form.source.neutral) for _, rating in steps]
        steps = [text for text, _ in steps]
    elif isinstance(steps, str) and isinstance(labels, str):
        begins, steps, labels = marked_steps(steps, labels)
        prompt = begins if prompt is None else prompt
    if not isinstance(steps, list) or not all(isinstance(step, str) and step.strip() for step in steps) or not steps:
        raise BadRow("the steps are not a list of texts")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise BadRow(f"the labels are not a list of {len(steps)} labels, one per step")
    steps, separator = [step.strip() for step in steps], form.source.separator
    if any(separator in step for step in steps):
        raise BadRow(f"a step has the separator, {separator!r}, and would be read as two")
    ends = [*(separator for _ in steps[1:]), ""]
    turns = [[{"role": "assistant", "content": step + end}] for step, end in zip(steps, ends, strict=True)]
    return _Example(prompt, turns, list(map(_step_label, labels)))


def _step_label(value: Any) -> float:
    """How surely a step is right, from 0 to 1. Raises BadRow, WrongForm."""
    if _is_missing(value):
        raise BadRow("the label of a step is empty")
    label = _LABELS.get(_word(value))
    with suppress(BadRow):
        number = _number(value, "label") if label is None else float(label)
        if 0.0 <= number <= 1.0:
            return number
    raise WrongForm("step_labels", f"the label of a step is {value!r:.60}: neither true nor false, nor from 0 to 1")


def _rating(value: Any, neutral: float) -> float:
    """The label of a step that is rated -1, 0 or 1. Raises WrongForm."""
    labels = {"-1": 0.0, "0": neutral, "1": 1.0}
    if _word(value) not in labels:
        raise WrongForm("steps", f"the rating of a step is {value!r:.60}: neither -1, 0 nor 1")
    return labels[_word(value)]


def _response(values: Mapping[str, Any], form: _Form) -> tuple[Any, list[Message]]:
    """Prompt and response, each in a separate column or both in one."""
    if "messages" not in values:
        return values["prompt"], _turns(values["response"], "response", values["prompt"], form)
    require_template(form.plain)
    return split_conversation(values["messages"], last=form.source.loss_on == "last")


def _answers(
    values: Mapping[str, Any], answers: Sequence[Any], names: Sequence[str], form: _Form
) -> tuple[Any, list[list[Message]]]:
    """Prompt and responses; the prompt of whole conversations is their common beginning."""
    answers = answers if form.plain else [*map(spoken_turns, _in_turns(values.get("prompt"), answers))]
    if "prompt" not in values or any(map(is_whole, answers)):
        require_template(form.plain)
        return split_answers(answers, names)
    pairs = zip(answers, names, strict=True)
    return values["prompt"], [_turns(answer, name, values["prompt"], form) for answer, name in pairs]


def _in_turns(prompt: Any, answers: Sequence[Any]) -> Sequence[Any]:
    """Whole conversations of prompts and answers with one text for each turn, as JSON; others as they are."""
    texts = [prompt, *answers]
    if not all(isinstance(text, str) and text.lstrip().startswith("[") for text in texts):
        return answers
    try:
        asked, *replies = map(json.loads, texts)
    except (ValueError, RecursionError):
        return answers
    if not all(isinstance(text, str) for text in chain(asked, *replies)):
        return answers
    if any(len(one) != len(asked) for one in replies):
        raise BadRow("prompt and answers have different numbers of turns")
    whole = (chain.from_iterable(zip(asked, one, strict=True)) for one in replies)
    roles = ("user", "assistant") * len(asked)
    return [[{"role": role, "content": text} for role, text in zip(roles, one, strict=True)] for one in whole]


def _turns(value: Any, what: str, prompt: Any, form: _Form) -> list[Message]:
    """The turns of a response. Behind `Assistant:` at the end of a prompt, the space is none of its text."""
    if form.source.tools is not None and is_calls(value):
        value = [{"role": "assistant", "tool_calls": value}]
    spoken = isinstance(value, str) and not form.plain and spoken_turns(prompt) is not prompt
    return response_turns(value.strip() if spoken else value, what, plain=form.plain)


_READERS: Mapping[DataFormat, Callable[[Mapping[str, Any], _Form], _Example]] = {
    "demonstrations": _demonstration,
    "pairs": _pair,
    "ranked": _ranked,
    "labelled": _labelled,
    "steps": _in_steps,
}


def _json(messages: Sequence[Message]) -> str:
    return json.dumps(messages, ensure_ascii=False)


def _numbers(values: Any, what: str, count: int) -> list[float]:
    """A number for each of the answers. Raises BadRow."""
    if not isinstance(values, list) or len(values) != count:
        raise BadRow(f"the {what}s are not a list of {count} numbers, one per answer")
    return [_number(value, f"{what} {number}") for number, value in enumerate(values)]


def _number(value: Any, what: str) -> float:
    """The number, which CSV has as text. Raises BadRow."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"the {what} is not a finite number: {value!r:.60}")
    return float(value)


def _check_texts(texts: Sequence[str], example: _Example, max_chars: int) -> None:
    for text in texts:
        require_whole(text, "a text")
    longest = max(map(characters, example.responses))
    if longest > max_chars:
        raise BadRow(f"a response has {longest} characters, more than max_chars {max_chars}")

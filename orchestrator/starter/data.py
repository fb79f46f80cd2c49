"""Reads the user's data for a first spec: the columns that the algorithm needs, by their usual names, and a reward
function that fits the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS, DataFormat
from troupe.orchestrator.data.bad_rows import BadRow, SkippedRow
from troupe.orchestrator.data.calls import CALLED
from troupe.orchestrator.data.conversations import STEP_END
from troupe.orchestrator.data.examples import as_examples, example_reader
from troupe.orchestrator.data.pools import Collected, collect
from troupe.orchestrator.data.preferences import answer_columns, column_names, doubts
from troupe.orchestrator.data.prompts import read_prompt
from troupe.orchestrator.data.readers import (
    find_column,
    has_column,
    json_safe,
    named_values,
    prompt_fields,
    prompt_row,
)
from troupe.orchestrator.errors import DataError, UsageError, nearest
from troupe.orchestrator.model_facts.model_size import SizeUnknown, read_size
from troupe.orchestrator.spec.offline import columns, data_format
from troupe.orchestrator.spec.sources import DataSource, Examples, ExampleSource
from troupe.orchestrator.starter.answers import asking, fitting_reward, fitting_tests
from troupe.orchestrator.starter.choices import GYM, Choices, Data, Earned, needs_answer, own_tasks
from troupe.orchestrator.starter.tables import Table, find_tables
from troupe.workers.contract.imports import gym_factory

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt": (
        *("prompt", "question", "instruction", "problem", "query", "input", "context_messages", "messages"),
        *("question_content", "Question", "question_stem", "ctx", "text"),
    ),
    "answer": (
        *("answer", "reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer", "gold"),
        *("extra_info.answer", "target", "Correct Answer", "answerKey", "label", "solution"),
    ),
    "response": (
        *("response", "completion", "output", "solution", "generation", "generated_solution", "code", "answer"),
        *("extra_info.answer", "answers"),
    ),
    "chosen": ("chosen", "preferred"),
    "rejected": ("rejected", "dispreferred"),
    "label": ("label", "desirable"),
    "answers": ("answers", "responses", "candidates"),
    "scores": ("scores", "rewards"),
}
"""Names to look for a column of the spec, the spec's own first: the names in GSM8K, MATH, verl, TRL, OpenRLHF,
LiveCodeBench and MBPP."""
_COMPARED_PROMPTS = (*_COLUMNS["prompt"][:-1], "history", "question.full_text", "info.post", "context")
"""Further names of prompts in preferences: SHP, WebGPT, summaries of OpenAI, HelpSteer3."""
_RATINGS = ("helpfulness", "overall_score", "score", "rating", "reward", "grade")
"""Names of the number of a row's answer, in HelpSteer2 and others."""
_SYSTEM = ("system", "system_prompt")
_CONVERSATIONS = ("messages", "conversations", "conversation")
"""Names of a column with whole conversations."""
_BESIDE_A_CONVERSATION = (*_SYSTEM, "tools", "image", "images")
_BESIDE_A_PROMPT = (
    *("instruction", "question", "problem", "query", "input", "context", "contexts", "passage", "passages"),
    *("document", "documents", "article", "paragraph", "history", "choices", "options", "starter_code"),
    *_BESIDE_A_CONVERSATION,
)
"""Columns without which a prompt may make no sense: the names in Alpaca, Dolly, SQuAD, MMLU and LiveCodeBench."""
_OFFLINE_COLUMNS: Mapping[DataFormat, tuple[str, ...]] = {
    "demonstrations": ("prompt", "response"),
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "response", "label"),
    "ranked": ("prompt", "answers", "scores"),
    "steps": ("prompt", "completions", "labels"),
}
_SMALL = 1_000_000_000
"""Parameters up to which a model gets a task's easiest settings; of the default ones it would solve next to none."""
_TASKS = 2000
"""Generated tasks to train on."""
_TOOLS = ("tools", "functions")
_COMPARED = 200
"""Rows in which the columns with responses are compared."""

Rows = Sequence[Mapping[str, Any]]


def read_data(choices: Choices) -> Data:
    """The chosen data. Raises UsageError if they do not fit the algorithm."""
    if choices.data.startswith(GYM):
        if choices.columns:
            raise UsageError("--column: generated tasks have no columns")
        if choices.offline:
            raise UsageError(f"--data: {choices.algorithm} learns from examples, not from generated tasks")
        return generated_data(choices)
    train, held_out, why = find_tables(choices.data)
    train = replace(train, names=_checked(choices.columns, train))
    found = _examples(choices, train) if choices.offline else _prompts(choices, train)
    columns = {name: value for name, value in found.section["train"].items() if name not in train.section}
    if system := next((name for name in _SYSTEM if any(_is_text(row.get(name)) for row in train.rows)), None):
        columns |= {"system_column": system}
    if choices.offline and (tools := tools_column(choices.algorithm, train.section | columns, train.rows)):
        columns |= {"tools": tools}
        found = replace(found, prompt_tokens=found.prompt_tokens + _tokens(train, tools))
    section = {"train": train.section | columns}
    notes = (*found.notes, *what_is_read(choices.algorithm, section["train"], train.rows))
    found = replace(found, section=section, unused=_unused(columns, train), notes=notes)
    there = {} if held_out is None else held_out.rows[0]
    read, _, _ = _reader(choices.algorithm, section["train"])
    if held_out is not None and (lost := [name for name in read.values() if not has_column(there, name)]):
        held_out, why = None, f"the held-out part has no column {lost[0]}"
    if held_out is None:
        return replace(found, without_evaluation=why)
    return replace(found, section=found.section | {"eval": held_out.section | columns})


def _prompts(choices: Choices, table: Table) -> Data:
    """Prompts with answers, and the reward function that their answers earn."""
    both = needs_answer(choices) and _found("prompt", table) is None and _found("answer", table) is None
    columns: dict[str, Any] = {**_named(("prompt", "answer") if both else ("prompt",), table, choices.data)}
    prompt = columns.get("prompt", "prompt")
    prompt_tokens = _tokens(table, prompt)
    # A label beside a response is what somebody thinks of it.
    labels = {"label"} if any(name in table.rows[0] for name in _COLUMNS["response"][:3]) else set[str]()
    answers = [name for name in _candidates("answer", table) if name in table.rows[0] and name not in {prompt, *labels}]
    if not needs_answer(choices):
        answer = answers[0] if answers else None
        columns |= {"answer": answer} if answer != "answer" else {}
        named = [name for name in own_tasks(choices.environment) if name in table.rows[0]]
        columns |= {"metadata": named} if named else {}
        return Data({"train": table.section | columns}, prompt_tokens, 0)
    found = None if "answer" in table.names else fitting_tests(table, prompt)
    if found is None and not answers:
        raise UsageError(
            f"--data: {choices.data} has no column with the answer (it has: {', '.join(table.rows[0])}): name it "
            f"{' or '.join(_COLUMNS['answer'][:3])}, or pass --column answer=NAME"
        )
    read, reward, note = found or fitting_reward(table, prompt, answers)
    columns |= read | asking(reward, [row.get(prompt) for row in table.rows])
    return Data({"train": table.section | columns}, prompt_tokens, 0, reward, notes=(note,) if note else ())


def _examples(choices: Choices, table: Table) -> Data:
    """Demonstrations or comparisons, in the first of the algorithm's formats."""
    needed = _OFFLINE_COLUMNS[OFFLINE_ALGORITHMS[choices.algorithm].formats[0]]
    if needed == ("prompt", "response"):
        columns = _demonstrations(choices, table)
        if "messages" in columns:
            return Data({"train": table.section | columns}, 0, _tokens(table, columns["messages"]))
        answers = [columns.get("response", "response")]
    elif "completions" in needed:
        columns, answers = _in_steps(table, choices.data)
    elif "chosen" in needed or "answers" in needed:
        columns = _compared(needed, table, choices.data)
        answers = column_names({"answers": columns.get("answers", [columns.get(name, name) for name in needed[1:3]])})
    else:
        columns = {**_named(needed, table, choices.data)}
        answers = [str(columns.get(name, name)) for name in needed[1:]]
    prompt = columns.get("prompt", "prompt")
    prompt_tokens = 0 if prompt is None else _tokens(table, prompt)  # without one, the answers are whole conversations
    return Data({"train": table.section | columns}, prompt_tokens, max(_tokens(table, name) for name in answers))


def _demonstrations(choices: Choices, table: Table) -> dict[str, str]:
    """The columns with conversations, or with a response to the prompt, whichever train most text."""
    found = [{"messages": name} for name in _CONVERSATIONS if name in table.rows[0]]
    responses = [name for name in _candidates("response", table) if name in table.rows[0]]
    if not found or (responses and _found("prompt", table)):
        named = _named(("prompt",) if responses else ("prompt", "response"), table, choices.data)
        found += [named | ({"response": name} if name != "response" else {}) for name in responses]
    return max(found, key=lambda columns: trained_characters(choices.algorithm, table.section | columns, table.rows))


def _compared(needed: Sequence[str], table: Table, data: str) -> dict[str, Any]:
    """The columns of answers to compare, and of their prompt unless the answers have it."""
    row = table.rows[0]
    if "chosen" in needed and all(_found(name, table) for name in ("chosen", "rejected")):
        columns: dict[str, Any] = {**_named(("chosen", "rejected"), table, data)}
    else:
        found = answer_columns(row)
        if found is None and all(isinstance(row.get(name), list) for name in ("completions", "labels")):
            raise UsageError(f"--data: {data} has a label for each step: --algorithm process_reward_model")
        if found is None and (in_rows := _one_in_a_row(table)):
            return in_rows
        if found is None and _is_text(row.get(_found("response", table) or "")):
            put = "put the answers of a prompt in one row, as a list `answers` beside a list of numbers `scores`"
            raise UsageError(f"--data: {data} has one answer in a row, and nothing to compare it with: {put}")
        columns = found if found is not None else {**_named(needed[1:], table, data)}
    prompts = (table.names["prompt"],) if "prompt" in table.names else _COMPARED_PROMPTS
    prompt = next((name for name in prompts if name in row and name not in column_names(columns)), None)
    return columns if prompt == "prompt" else {"prompt": prompt, **columns}


def _one_in_a_row(table: Table) -> dict[str, Any]:
    """The columns of answers to one prompt in rows that follow each other; empty if these have none."""
    answer, prompt = _found("response", table), _found("prompt", table)
    score = next((name for name in _RATINGS if isinstance(table.rows[0].get(name), int | float)), None)
    if not answer or not prompt or score is None:
        return {}
    prompts = [row.get(prompt) for row in table.rows]
    follows = sum(one == other for one, other in pairwise(prompts))
    if follows < len(prompts) / 4:
        return {}
    columns = {"answers": answer, "scores": score, "one_in_a_row": True}
    return columns if prompt == "prompt" else {"prompt": prompt, **columns}


def _in_steps(table: Table, data: str) -> tuple[dict[str, Any], list[str]]:
    """The columns of steps with labels, and those whose length is a response's."""
    row = table.rows[0]
    if all(isinstance(row.get(name), list) for name in ("completions", "labels")):
        return {**_named(("prompt",), table, data)}, ["completions"]
    if all(isinstance(row.get(name), str) for name in ("input", "label")) and STEP_END in row["input"]:
        return {"prompt": None, "steps": "input", "step_labels": "label"}, ["input"]
    if isinstance(row.get("label.steps"), list) and "question.problem" in row:  # PRM800K
        return {"prompt": "question.problem", "steps": "label.steps", "step_labels": None}, ["label.steps"]
    raise UsageError(
        f"--data: {data} has no labels of steps (it has: {', '.join(row)}): name a list of steps completions, and a "
        "list of their labels labels"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _unused(columns: Mapping[str, Any], table: Table) -> tuple[str, ...]:
    """Columns that look like parts of the prompt, have values, and are none of the spec's `columns`."""
    prompt = None if "messages" in columns else columns.get("prompt", "prompt")
    whole = prompt is None or isinstance(table.rows[0].get(prompt), list)
    parts = (
        name for name in (_BESIDE_A_CONVERSATION if whole else _BESIDE_A_PROMPT) if name not in column_names(columns)
    )
    return tuple(name for name in parts if any(row.get(name) not in (None, "", [], {}) for row in table.rows))


def _candidates(column: str, table: Table) -> tuple[str, ...]:
    return (table.names[column],) if column in table.names else _COLUMNS[column]


def _found(column: str, table: Table) -> str | None:
    return next((name for name in _candidates(column, table) if name in table.rows[0]), None)


def _checked(columns: Mapping[str, str], table: Table) -> Mapping[str, str]:
    """The columns that the user names. Raises UsageError for an unknown field, and for a column that is not there."""
    for column, name in columns.items():
        if column not in _COLUMNS:
            hint = nearest(column, _COLUMNS) or f"known: {', '.join(_COLUMNS)}"
            raise UsageError(f"--column: no field '{column[:60]}' ({hint})")
        if name not in table.rows[0]:
            raise UsageError(f"--column: the data have no column '{name[:60]}' (they have: {', '.join(table.rows[0])})")
    return columns


def _named(columns: Sequence[str], table: Table, data: str) -> dict[str, str]:
    """The columns whose name in the file is not the spec's default. Raises UsageError if one is missing."""
    found = {column: _found(column, table) for column in columns}
    if lost := [column for column, name in found.items() if name is None]:
        flags = " ".join(f"--column {column}=NAME" for column in lost)
        there = f"it has: {', '.join(table.rows[0])}; {flags} names {'it' if len(lost) == 1 else 'them'}"
        raise UsageError(f"--data: {data} has no column {' or '.join(lost)} ({there})")
    return {column: name for column, name in found.items() if name is not None and name != column}


def _tokens(table: Table, column: str) -> int:
    """Room for the longest value, with the chat template: two characters a token, and at least 128."""
    longest = max(len(str(find_column(row, column))) for row in table.rows if has_column(row, column))
    return min(4096, max(128, 64 * -(-(longest // 2 + 64) // 64)))


def generated_data(choices: Choices) -> Data:
    """Generated tasks to train and evaluate on."""
    task = choices.data.removeprefix(GYM)
    recipe: dict[str, Any] = {"name": task}
    tasks, notes = _TASKS, ()
    if _is_small(choices.model) and (settings := easiest(task)):
        recipe["args"], tasks = settings, trained_tasks(task, settings)
        notes = ("The tasks are the easiest of their kind, for a small model: `args` of the recipe makes them harder.",)
    train = {"kind": "reasoning_gym", "recipes": [recipe], "size": tasks, "seed": 1}
    section = {"train": train, "eval": train | {"size": 200, "seed": 2}}
    return Data(section, 512, 0, Earned("reasoning_gym"), notes=notes)


def _is_small(model: str) -> bool:
    try:
        return read_size(Path(model)).parameters <= _SMALL
    except SizeUnknown:
        return False


def trained_tasks(task: str, settings: Mapping[str, Any]) -> int:
    """Tasks to train on: half of the different ones if there are few, because a task is not evaluated on as well."""
    made = gym_factory().create_dataset(task, size=_TASKS, seed=0, **settings)
    different = len({entry["question"] for entry in made})
    return _TASKS if different > _TASKS // 2 else max(1, different // 2)


def easiest(task: str) -> dict[str, Any]:
    """Settings of a task at the first level of its curriculum; empty if it has none that the task takes."""
    factory = gym_factory()
    if not factory.has_curriculum(task):
        return {}
    try:
        config = factory.create_curriculum(task).generate_configuration({"seed": 0})
        config.validate()
    except Exception:  # a curriculum may leave the bounds of the task, which raises anything
        return {}
    fields = [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")]
    return json_safe({name: getattr(config, name) for name in fields})


def tools_column(algorithm: str, section: Mapping[str, Any], rows: Rows) -> str | None:
    """The column with the tools of rows that call some, or None if calls are text, and so are the tools (Hermes)."""
    filled = (name for name in _TOOLS if any(row.get(name) not in (None, "", "[]", []) for row in rows))
    if (name := next(filled, None)) is None:
        return None
    source: ExampleSource = TypeAdapter[Examples](ExampleSource).validate_python({**section, "tools": name})
    format_ = data_format(OFFLINE_ALGORITHMS[algorithm].formats, source)
    read, fields = example_reader(source, format_, plain=False), columns(format_, source)
    for row in rows:
        with suppress(BadRow, SkippedRow, KeyError):
            if any(CALLED in response for response in read(named_values(fields, "", row))["responses"]):
                return name
    return None


def what_is_read(algorithm: str, section: Mapping[str, Any], rows: Rows) -> tuple[str, ...]:
    """What a section of the spec reads of the first rows, and what it leaves out, one line for each. Raises UsageError
    if no row can be used, or a column does not say what it is read as."""
    try:
        fields, found = _collected(algorithm, section, rows)
    except DataError as error:
        raise UsageError(f"--data: {error}") from None
    left_out = [f"{count} {kind}" for kind, count in found.skipped.items()]
    left_out += [f"{found.bad_rows} bad rows (the first: {found.problems[0]})"] if found.bad_rows else []
    notes = [f"Of the first {len(rows)} rows are left out: {', '.join(left_out)}."] if left_out else []
    if "chosen" in fields:
        notes += [f"Warning: {doubt}." for doubt in doubts(fields["chosen"], fields["rejected"], rows)]
    read = fields.values()
    unread = [name for name in rows[0] if name and not any(one == name or one.startswith(f"{name}.") for one in read)]
    return (*notes, *([f"Columns that the spec does not read: {', '.join(unread)}."] if unread else []))


def trained_characters(algorithm: str, section: Mapping[str, Any], rows: Rows) -> int:
    """The length of what the first rows would train, 0 if none can be used."""
    try:
        _, found = _collected(algorithm, section, rows[:_COMPARED])
    except DataError:
        return 0
    return sum(len(text) for row in found.rows for text in row["responses"])


def _reader(
    algorithm: str, section: Mapping[str, Any]
) -> tuple[Mapping[str, str], Callable[..., dict[str, Any]], Callable[..., Iterator[Any]]]:
    """Column of each field that a section reads, and how a run reads a row and joins rows. Raises DataError."""
    if algorithm in OFFLINE_ALGORITHMS:
        examples: ExampleSource = TypeAdapter[Examples](ExampleSource).validate_python(section)
        format_ = data_format(OFFLINE_ALGORITHMS[algorithm].formats, examples)
        read = example_reader(examples, format_, plain=False)
        return columns(format_, examples), read, partial(as_examples, examples)
    prompts: Any = TypeAdapter[DataSource](DataSource).validate_python(section)
    read = lambda raw: {"prompt": read_prompt(prompt_row(prompts, raw), prompts, plain=False)}  # noqa: E731
    return prompt_fields(prompts), read, iter


def _collected(
    algorithm: str, section: Mapping[str, Any], rows: Rows
) -> tuple[Mapping[str, str], Collected[dict[str, Any]]]:
    """Column of each field that the section reads, and what a run reads of the rows. Raises DataError."""
    fields, read, join = _reader(algorithm, section)
    raw = (named_values(fields, f"row {number}", row) for number, row in enumerate(rows, start=1))
    return fields, collect(join(raw), read, "data.train", "skip")

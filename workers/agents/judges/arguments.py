"""The arguments of the reward function `judge`, and the questions that follow from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from troupe.workers.agents.judges.endpoint import HttpJudgeConfig
from troupe.workers.agents.judges.scores import (
    BASELINE,
    FORMS,
    JudgeError,
    Order,
    expected_score,
    reasons_in,
    shown,
)
from troupe.workers.agents.judges.transcript import Baseline, played, said
from troupe.workers.contract.config_base import Frozen, first_problem
from troupe.workers.contract.environments import Message
from troupe.workers.contract.imports import PackageMissing, require_package
from troupe.workers.contract.judges import (
    JudgeAnswer,
    Question,
    is_file,
)
from troupe.workers.contract.templates import TEMPLATE_FIELDS, checked_fields, template_fields
from troupe.workers.rewards.runner import Sample

_TASK = "<task>\n{prompt}\n</task>\n\n"
_RESPONSE = "<response>\n{response}\n</response>"
_ANSWER = "\n\n<reference_answer>\n{answer}\n</reference_answer>"
_ONLY_IN = {"scale": ("", "group"), "expected": ("",), "opponents": ("pairs",), "baseline": ("baseline",)}
"""The values of `compare` with which a field has an effect."""


class Criterion(Frozen):
    """One of several things that a response is judged by."""

    criterion: str = Field(min_length=1, validation_alias=AliasChoices("criterion", "description", "text"))
    """What the judge reads behind the rubric."""
    weight: float = Field(default=1.0, validation_alias=AliasChoices("weight", "points"))
    """Its part of the reward; below 0: it counts against the response."""


class RowCriterion(Criterion):
    """A criterion in a row of the data, which may have other fields."""

    model_config = ConfigDict(extra="ignore")


_CRITERIA: TypeAdapter[list[RowCriterion]] = TypeAdapter(list[RowCriterion])


@dataclass(frozen=True)
class Asked:
    """A question about samples of a group, or why it cannot be asked."""

    order: Order
    """The samples that it shows."""
    question: Question | None = None
    weight: float = 1.0
    """Its part of their rewards."""
    part: tuple[int, int] = (0, 0)
    """Turn among several answers, and criterion."""
    problem: str = ""


class JudgeArgs(Frozen):
    """Arguments of the reward function `judge`."""

    rubric: str
    """What to judge by. How to write the answer is added to it."""
    compare: Literal["", "group", "pairs", "baseline"] = ""
    """What the judge compares: `group`, all samples of a prompt in one question, each of which gets a score; `pairs`,
    each two of them, in both orders; `baseline`, each with another answer, in both orders. A win earns 1, a tie a half.
    If empty, each response gets a separate score."""
    baseline: str = ""
    """The other answer: a column of `metadata`, or a `.parquet` or `.jsonl` file with the stored responses of a model,
    such as `evaluation/step-000000.parquet` of a run; if empty, the answer of the data."""
    opponents: int = Field(default=0, ge=0)
    """Other samples of the group that each one is compared with in pairs (an odd number counts as the next even one);
    0: all of them."""
    answers: int = Field(default=1, ge=1)
    """Answers to each question, whose mean counts. In a `group` each shows the responses in another order."""
    expected: bool = False
    """The score is the mean of those that the answer could have, by the log-probs of the score's token. For scales of
    digits, and the role `judge` or an endpoint that returns log-probs."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; the reward is the score's position between them, from 0 to 1."""
    template: str = ""
    """What the judge reads, with `{prompt}`, `{response}`, `{answer}` and the columns of the data's `metadata`. If
    empty, the task, the response, and the data's reference answer, if any. Responses that are compared stand in
    elements with their names."""
    criteria: tuple[Criterion, ...] | str = ()
    """Criteria that the judge scores one by one, or the column of `metadata` with those of each row. The reward is
    their weighted mean: the sum of weight times score, by the sum of the weights above 0, from 0 to 1."""
    endpoint: HttpJudgeConfig | None = None
    """The model to ask, or None for the role `judge`."""
    cache: str = ""
    """SQLite file with scored answers, which are used again for the same question, and with the number of questions;
    if empty, each worker keeps its answers in memory."""
    max_requests: int | None = Field(default=None, ge=1)
    """Most questions that all workers and runs with the same `cache` ask, or None for no bound."""

    @field_validator("rubric")
    @classmethod
    def _has_text(cls, rubric: str) -> str:
        if not rubric.strip():
            raise ValueError("is empty")
        return rubric

    @field_validator("template")
    @classmethod
    def _names_fields(cls, template: str) -> str:
        if "response" not in checked_fields(template, TEMPLATE_FIELDS) and template:
            raise ValueError("needs {response}")
        return template

    @model_validator(mode="after")
    def _works(self) -> JudgeArgs:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: the lowest score must come first, got {self.scale}")
        if isinstance(self.criteria, tuple) and self.criteria and not any(one.weight > 0 for one in self.criteria):
            raise ValueError("criteria: no weight is above 0")
        given, endpoint = self.model_fields_set, self.endpoint
        if idle := [name for name, forms in _ONLY_IN.items() if name in given and self.compare not in forms]:
            raise ValueError(f"{idle[0]}: has no effect with compare: {self.compare or 'none'}; remove it")
        if self.answers > 1 and self.compare != "group" and endpoint is not None and endpoint.temperature == 0:
            raise ValueError("answers: are all the same at endpoint.temperature 0: set it above 0")
        if self.expected and not {*self.scale} <= {float(digit) for digit in range(10)}:
            raise ValueError("expected: needs a scale between two digits such as [1, 5]")
        limits = () if endpoint is None else (endpoint.requests_per_minute, endpoint.tokens_per_minute)
        if not self.cache and any(limit is not None for limit in (self.max_requests, *limits)):
            raise ValueError("cache: name a file, in which all workers count (max_requests, limits by the minute)")
        return self

    def questions(self, samples: Sequence[Sample], baseline: Baseline) -> Iterator[Asked]:
        """The questions about the samples of a group, one for each criterion, if there are some."""
        form = FORMS[self.compare]
        for turn in range(self.answers):
            for order in form.orders(len(samples), turn * len(samples) // self.answers, self.opponents):
                try:
                    yield from self._asked(samples, order, turn, baseline)
                except JudgeError as error:
                    yield Asked(order, problem=str(error))

    def _asked(self, samples: Sequence[Sample], order: Order, turn: int, baseline: Baseline) -> Iterator[Asked]:
        """The questions that show these samples in this order. Raises JudgeError."""
        row = samples[max(order)]
        texts = [baseline.answer(row) if one == BASELINE else _response(samples[one]) for one in order]
        columns = json.loads(row.metadata)
        for number, (weight, criterion) in enumerate(self._criteria(columns)):
            question = Question(self._question(row, columns, criterion, texts), turn)
            yield Asked(order, question, weight, (turn, number))

    def _criteria(self, columns: Mapping[str, Any]) -> list[tuple[float, str]]:
        """Weight and text of each criterion; one without a text if none are set. Raises JudgeError."""
        criteria: Sequence[Criterion] = self.criteria if isinstance(self.criteria, tuple) else ()
        if isinstance(self.criteria, str):
            given = columns.get(self.criteria)
            try:
                criteria = _CRITERIA.validate_python(json.loads(given) if isinstance(given, str) else given)
            except (ValidationError, ValueError) as error:
                why = first_problem(error) if isinstance(error, ValidationError) else str(error)
                raise JudgeError(f"the row's column {self.criteria} has no criteria: {why}") from error
            if not any(one.weight > 0 for one in criteria):
                raise JudgeError(f"the row's column {self.criteria} has no criterion with a weight above 0")
        return [(one.weight, one.criterion) for one in criteria] or [(1.0, "")]

    def _question(self, row: Sample, columns: Mapping[str, Any], criterion: str, texts: Sequence[str]) -> list[Message]:
        """The question about responses as a conversation. Raises JudgeError if the row lacks a column."""
        (low, high), form = self.scale, FORMS[self.compare]
        is_shown = self.compare == "baseline" and not self.baseline  # the data's answer, as one of the responses
        answer = _ANSWER if row.answer and not is_shown else ""
        template = self.template or _TASK + ("{response}" if form.labels else _RESPONSE) + answer
        fields = {name: text if isinstance(text, str) else json.dumps(text) for name, text in columns.items()}
        fields |= {"prompt": said(row.messages), "response": shown(texts, form), "answer": row.answer}
        if missing := [name for name in template_fields(template) if name not in fields]:
            raise JudgeError(f"the row has no column {missing[0]} for the template")
        how = form.how.format(low=low, high=high)
        parts = [self.rubric.strip(), *([f"Criterion: {criterion}"] if criterion else []), how]
        system = {"role": "system", "content": "\n\n".join(parts)}
        return [system, {"role": "user", "content": template.format_map(fields)}]

    def points(self, answer: str, responses: int = 1) -> Sequence[float]:
        """The points of each response in a judge's answer, from 0 to 1. Raises JudgeError if it has none."""
        return FORMS[self.compare].points(answer, responses, *self.scale)

    def reasons(self, answer: str) -> str:
        """The reasons in an answer about one response; empty for one that compares responses."""
        return "" if FORMS[self.compare].labels else reasons_in(answer)

    def settled(self, answer: JudgeAnswer) -> JudgeAnswer:
        """The answer as it counts: the expected score instead of the answer's own if that is wanted."""
        if not self.expected or answer.failure:
            return answer
        try:
            return JudgeAnswer(f"{answer.text}\nScore: {expected_score(answer, *self.scale):.6f}")
        except JudgeError as error:
            return JudgeAnswer(failure=str(error), said=answer.text)


def _response(sample: Sample) -> str:
    """A response, or all turns of an episode."""
    return played(sample.messages, sample.conversation) if sample.conversation else sample.response


def read_args(args: Mapping[str, Any]) -> JudgeArgs:
    """Arguments of the function in a spec. Raises JudgeError."""
    try:
        return JudgeArgs.model_validate(args)
    except ValidationError as error:
        raise JudgeError(first_problem(error)) from error


def judge_problem(args: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of the function in a spec; empty if they are valid."""
    try:
        read = read_args(args)
        if read.endpoint is not None:
            require_package("openai", "an endpoint")
        if is_file(read.baseline) and not Path(read.baseline).is_file():
            return f"baseline: no such file: {read.baseline}"
    except (JudgeError, PackageMissing) as error:
        return str(error)
    return ""

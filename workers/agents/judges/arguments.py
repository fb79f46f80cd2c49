"""The arguments of the reward function `judge`, and the questions that follow from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from troupe.workers.agents.judges.endpoint import HttpJudgeConfig
from troupe.workers.agents.judges.scores import JudgeError, read_score
from troupe.workers.agents.judges.transcript import played, said
from troupe.workers.contract.config import Frozen, first_problem
from troupe.workers.contract.environments import Message
from troupe.workers.contract.imports import PackageMissing, require_package
from troupe.workers.contract.judges import TEMPLATE_FIELDS, template_fields
from troupe.workers.rewards.runner import Sample

_TEMPLATE = "<task>\n{prompt}\n</task>\n\n<response>\n{response}\n</response>"
_TEMPLATE_WITH_ANSWER = _TEMPLATE + "\n\n<reference_answer>\n{answer}\n</reference_answer>"


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


class JudgeArgs(Frozen):
    """Arguments of the reward function `judge`."""

    rubric: str
    """What to judge by. How to write the score is added to it."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; the reward is the score's position between them, from 0 to 1."""
    template: str = ""
    """What the judge reads, with `{prompt}`, `{response}`, `{answer}` and the columns of the data's `metadata`. If
    empty, the task, the response, and the data's reference answer, if any."""
    criteria: tuple[Criterion, ...] | str = ()
    """Criteria that the judge scores one by one, or the column of `metadata` with those of each row. The reward is
    their weighted mean: the sum of weight times score, by the sum of the weights above 0, from 0 to 1."""
    endpoint: HttpJudgeConfig | None = None
    """The model to ask, or None for the role `judge`."""
    cache: str = ""
    """SQLite file with scored answers, which are used again for the same question, and with the number of questions;
    if empty, each worker keeps both in memory."""
    max_requests: int | None = Field(default=None, ge=1)
    """Most questions that all workers and runs with the same `cache` ask, or each worker without one, or None for no
    bound."""

    @field_validator("rubric")
    @classmethod
    def _has_text(cls, rubric: str) -> str:
        if not rubric.strip():
            raise ValueError("is empty")
        return rubric

    @field_validator("template")
    @classmethod
    def _names_fields(cls, template: str) -> str:
        names = template_fields(template)
        if wrong := [name for name in names if not name or {".", "["} & set(name)]:
            can = f"{', '.join(TEMPLATE_FIELDS)} and columns of metadata"
            raise ValueError(f"has no field {{{wrong[0]}}}; it can have {can}; write {{{{ for a brace")
        if template and "response" not in names:
            raise ValueError("needs {response}")
        try:
            template.format_map(dict.fromkeys(names, ""))
        except (ValueError, KeyError) as error:
            raise ValueError(f"cannot be filled in: {error}") from error
        return template

    @model_validator(mode="after")
    def _has_scale(self) -> JudgeArgs:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: the lowest score must come first, got {self.scale}")
        if isinstance(self.criteria, tuple) and self.criteria and not any(one.weight > 0 for one in self.criteria):
            raise ValueError("criteria: no weight is above 0")
        return self

    def questions(self, sample: Sample) -> list[tuple[float, list[Message]]]:
        """Weight and question of each criterion; one question without criteria.

        Raises:
            JudgeError: the row lacks a column of the template, or has no criteria.
        """
        columns = json.loads(sample.metadata)
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
        asked = [(one.weight, one.criterion) for one in criteria] or [(1.0, "")]
        return [(weight, self._question(sample, columns, criterion)) for weight, criterion in asked]

    def _question(self, sample: Sample, columns: Mapping[str, Any], criterion: str) -> list[Message]:
        """The question about a response, or all turns of an episode, as a conversation."""
        low, high = self.scale
        how = f"End your answer with a line `Score: N`, where N is a number from {low:g} to {high:g}."
        template = self.template or (_TEMPLATE_WITH_ANSWER if sample.answer else _TEMPLATE)
        shown = {name: text if isinstance(text, str) else json.dumps(text) for name, text in columns.items()}
        fields = shown | {
            "prompt": said(sample.messages),
            "response": played(sample.messages, sample.conversation) if sample.conversation else sample.response,
            "answer": sample.answer,
        }
        if missing := [name for name in template_fields(template) if name not in fields]:
            raise JudgeError(f"the row has no column {missing[0]} for the template")
        parts = [self.rubric.strip(), *([f"Criterion: {criterion}"] if criterion else []), how]
        system = {"role": "system", "content": "\n\n".join(parts)}
        return [system, {"role": "user", "content": template.format_map(fields)}]

    def reward(self, answer: str) -> float:
        """The reward in a judge's answer, from 0 to 1. Raises JudgeError if it has no score on the scale."""
        low, high = self.scale
        return (read_score(answer, low, high) - low) / (high - low)


def read_args(args: Mapping[str, Any]) -> JudgeArgs:
    """Arguments of the function in a spec. Raises JudgeError."""
    try:
        return JudgeArgs.model_validate(args)
    except ValidationError as error:
        raise JudgeError(first_problem(error)) from error


def judge_problem(args: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of the function in a spec; empty if they are valid."""
    try:
        if read_args(args).endpoint is not None:
            require_package("openai", "an endpoint")
    except (JudgeError, PackageMissing) as error:
        return str(error)
    return ""

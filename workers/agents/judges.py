"""A judge: the question that it is asked, the score in its answer, and the reward component that asks it."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from troupe.workers.agents.judge_http import HttpJudge, HttpJudgeConfig
from troupe.workers.agents.judge_scores import JudgeError, read_score
from troupe.workers.contract.config import Frozen, RewardFunctionConfig, first_problem
from troupe.workers.contract.environments import Message
from troupe.workers.contract.imports import PackageMissing, require_package
from troupe.workers.contract.judges import TEMPLATE_FIELDS, Judge, JudgeAnswer, template_fields
from troupe.workers.rewards.runner import RewardResult, Sample

_TEMPLATE = "<task>\n{prompt}\n</task>\n\n<response>\n{response}\n</response>"
_TEMPLATE_WITH_ANSWER = _TEMPLATE + "\n\n<reference_answer>\n{answer}\n</reference_answer>"
_SHOWN = 200
"""Characters of an answer in a status."""
_BUSY_S = 30.0


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
            "prompt": _said(sample.messages),
            "response": _played(sample.messages, sample.conversation) if sample.conversation else sample.response,
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


def _said(messages: str) -> str:
    """The prompt as text; a single message stands alone."""
    turns = json.loads(messages)
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(map(_turn, turns))


def _played(messages: str, conversation: str) -> str:
    """All that was said in an episode, without the messages of the prompt at its beginning.

    An environment can show the prompt, a part of it, other messages before it, or something else.
    """
    prompt, turns = json.loads(messages), json.loads(conversation)
    said, read = list[str](), 0
    for place, turn in enumerate(turns):
        found = next((at for at in range(read, len(prompt)) if _behind(turn, prompt[at]) is not None), None)
        if turn["role"] == "assistant" and (found is None or not _is_example(prompt, found, turns, place)):
            said += map(_turn, turns[place:])  # from the first turn of the policy
            break
        if found is None:
            said.append(_turn(turn))
            continue
        rest = _behind(turn, prompt[found])
        said += [_turn(turn | {"content": rest})] if rest else []
        read = found + 1
    return "\n\n".join(said)


def _behind(turn: Message, asked: Message) -> str | None:
    """The text of a message behind one of the prompt, in separate paragraphs, or None if it does not begin with it."""
    content, known = str(turn["content"]).strip(), str(asked["content"]).strip()
    if turn["role"] != asked["role"] or not content.startswith(known):
        return None
    rest = content[len(known) :]
    return rest.strip() if not rest or rest.startswith("\n\n") else None


def _is_example(prompt: Sequence[Message], at: int, turns: Sequence[Message], place: int) -> bool:
    """Whether the turn at `place` is the prompt's answer `at`, not the same answer of the policy.

    Then it is between the messages that the prompt has it between.
    """
    for step in (-1, 1):
        if not 0 <= at + step < len(prompt):
            continue
        beside, asked = turns[place + step : place + step + 1] if place + step >= 0 else [], prompt[at + step]
        if not any(turn["role"] == asked["role"] and asked["content"].strip() in turn["content"] for turn in beside):
            return False
    return True


def _turn(turn: Message) -> str:
    """A message as text, with its calls of tools."""
    calls = [call.get("function") or {} for call in turn.get("tool_calls") or ()]
    called = [f"[calls {call.get('name')} with {call.get('arguments')}]" for call in calls]
    content = str(turn["content"])
    return f"{turn['role']}: " + "\n".join([content, *called] if content else called)


class AnswerCache:
    """Answers by question, in an SQLite file that several workers and runs can share."""

    def __init__(self, path: str = "") -> None:
        """`path`: the file, which is created for its owner only; in memory if empty. Raises OSError."""
        try:
            if path:  # SQLite gives its journals the mode of the file
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # Groups are scored on a separate thread, one after another.
            self._database = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, check_same_thread=False)
            with self._database:
                self._database.execute("CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT)")
                self._database.execute("CREATE TABLE IF NOT EXISTS asked (budget TEXT PRIMARY KEY, number INTEGER)")
        except (sqlite3.Error, OSError) as error:
            raise OSError(f"the cache of judges' answers {path} cannot be opened: {error}") from error

    def find(self, questions: Iterable[str]) -> dict[str, str]:
        """The answers that are known, by question."""
        found = {}
        for question in questions:
            row = self._database.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
            if row is not None:
                found[question] = row[0]
        return found

    def add(self, answers: Mapping[str, str]) -> None:
        """Keeps answers."""
        with self._database:
            self._database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", answers.items())

    def take(self, budget: str, wanted: int, most: int) -> int:
        """Takes questions from a budget of `most`; returns how many of the wanted ones it has left."""
        with self._database:
            self._database.execute("INSERT OR IGNORE INTO asked VALUES (?, 0)", (budget,))  # locks the file
            (asked,) = self._database.execute("SELECT number FROM asked WHERE budget = ?", (budget,)).fetchone()
            taken = max(0, min(wanted, most - asked))
            self._database.execute("UPDATE asked SET number = number + ? WHERE budget = ?", (taken, budget))
        return taken

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def question_key(judge: str, question: Sequence[Message]) -> str:
    """Name of a question to a judge: equal for equal questions."""
    return hashlib.sha256(json.dumps([judge, *question], sort_keys=True).encode()).hexdigest()


class JudgeReward:
    """Scores of a judge, from 0 to 1. An outage, a spent budget and an answer without a score are statuses."""

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.config = config
        self._args = read_args(config.args)
        self._judge: Judge | None = None
        self._cache: AnswerCache | None = None
        self._budget = self._args.model_dump_json(exclude={"cache", "max_requests"})

    def start(self) -> None:
        """Open the cache and the endpoint.

        Raises:
            JudgeError: the key of the endpoint is not set.
            OSError: the cache cannot be opened.
        """
        self._cache = AnswerCache(self._args.cache)
        if self._args.endpoint is not None:
            self._judge = HttpJudge(self._args.endpoint)

    def connect(self, judge: Judge) -> None:
        """Ask the role `judge` from now on, unless the arguments name an endpoint."""
        if self._args.endpoint is None:
            self._judge = judge

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One outcome per sample. Equal questions are asked once. Raises JudgeGone."""
        if self._judge is None or self._cache is None:
            return [_failed("no judge is connected")] * len(samples)
        questions = dict[str, list[Message]]()
        parts = list[list[tuple[float, str]] | RewardResult]()
        for sample in samples:
            try:
                asked = self._args.questions(sample)
            except JudgeError as error:
                parts.append(_failed(str(error)))
                continue
            keys = [question_key(self._judge.name, question) for _, question in asked]
            questions |= {key: question for key, (_, question) in zip(keys, asked, strict=True)}
            parts.append([(weight, key) for key, (weight, _) in zip(keys, asked, strict=True)])
        known = {key: self._read(JudgeAnswer(text)) for key, text in self._cache.find(questions).items()}
        scores = {key: score for key, score in known.items() if isinstance(score, float)}
        answers = self._ask(self._judge, self._cache, {key: questions[key] for key in questions if key not in scores})
        new = {key: self._read(answer) for key, answer in answers.items()}
        self._cache.add({key: answers[key].text for key, score in new.items() if isinstance(score, float)})
        return [part if isinstance(part, RewardResult) else _outcome(part, scores | new) for part in parts]

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _read(self, answer: JudgeAnswer) -> float | RewardResult:
        """The score in an answer, from 0 to 1, or the failure if it has none."""
        if answer.failure:
            return _failed(answer.failure, answer.said[:_SHOWN])
        try:
            return self._args.reward(answer.text)
        except JudgeError as error:
            return _failed(str(error), answer.text[-_SHOWN:])

    def _ask(self, judge: Judge, cache: AnswerCache, questions: dict[str, list[Message]]) -> dict[str, JudgeAnswer]:
        """Answers by key, as far as the budget reaches."""
        budget = self._args.max_requests
        left = len(questions) if budget is None else cache.take(self._budget, len(questions), budget)
        asked = dict(list(questions.items())[:left])
        answers = judge.ask(list(asked.values()), self.config.timeout_s) if asked else []
        spent = JudgeAnswer(failure=f"the budget of {budget} questions (max_requests) is used up")
        return dict.fromkeys(questions, spent) | dict(zip(asked, answers, strict=True))


def _outcome(parts: Sequence[tuple[float, str]], scores: Mapping[str, float | RewardResult]) -> RewardResult:
    """The weighted mean of the scores with these keys, or the first failure if there is one."""
    total = 0.0
    for weight, key in parts:
        score = scores[key]
        if isinstance(score, RewardResult):
            return score
        total += weight * score
    return RewardResult(min(1.0, max(0.0, total / sum(max(0.0, weight) for weight, _ in parts))))


def _failed(reason: str, said: str = "") -> RewardResult:
    """A failure for a reason; what the judge `said` differs between failures of the same cause."""
    return RewardResult(None, f"judge: {reason}" + (f": {said!r}" if said else ""), cause=f"judge: {reason}")

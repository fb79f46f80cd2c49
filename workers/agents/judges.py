"""A judge: the question that it is asked, the score in its answer, and the reward component that asks it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from troupe.workers.contract.config import Frozen, RewardFunctionConfig, first_problem
from troupe.workers.contract.environments import Message
from troupe.workers.contract.imports import PackageMissing, require_package
from troupe.workers.contract.judges import Judge, JudgeAnswer, whole_words
from troupe.workers.contract.text import has_credentials, one_line, valid_text
from troupe.workers.rewards.answer_text import plain, visible
from troupe.workers.rewards.runner import RewardResult, Sample

FIELDS = ("prompt", "response", "answer")
"""What a template can contain."""
_TEMPLATE = "<task>\n{prompt}\n</task>\n\n<response>\n{response}\n</response>"
_TEMPLATE_WITH_ANSWER = _TEMPLATE + "\n\n<reference_answer>\n{answer}\n</reference_answer>"
_SCORE = re.compile(
    r"score\W{0,5}[:=]\W{0,5}?(?P<score>-?[0-9]+(?:[.,][0-9]+)?)"
    r"(?:[`* (]{0,5}(?:(?:/|(?:points? )?(?:out )?of)[`* ]{0,5}(?P<most>[0-9]+(?:\.[0-9]+)?)|(?P<percent>%)))?",
    re.IGNORECASE,
)
_CONTINUED = re.compile(
    r"(?:e[-+]?(?=[0-9])|(?:[^\w\n.([{]|_|\.(?=[0-9])|\.{2,}|\b(?:or|to|and|bis|through|until|even|maybe|perhaps)\b)*+)"
    r"(?:[0-9]+|[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2079\u2150-\u215e])",
    re.IGNORECASE,
)
"""What follows a number that is no score alone: the end of a range, the rest of a sum or of a fraction. Other numbers
may follow in brackets, behind the end of a sentence and behind words."""
_SHOWN_BYTES = 500
"""Bytes of a body in a failure."""
_SHOWN = 200
"""Characters of an answer in a status."""
_BUSY_S = 30.0


class JudgeError(ValueError):
    """The arguments of a judge cannot be used, or it gave no score."""


class HttpJudgeConfig(Frozen):
    """A model behind an endpoint that speaks OpenAI's chat-completions protocol."""

    url: str
    """Address of the endpoint, such as `https://api.openai.com/v1`."""
    model: str
    """Name of the model."""
    api_key_variable: str = ""
    """Environment variable of the reward workers with the key; empty if the endpoint needs none."""
    temperature: float | None = Field(default=0.0, ge=0.0)
    """Sampling temperature, or None for the endpoint's own."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests of one reward worker at the same time."""
    retries: int = Field(default=4, ge=0)
    """Repetitions of a request that was refused for load (429), failed (5xx) or lost, with exponential back-off."""

    @field_validator("url")
    @classmethod
    def _has_no_credentials(cls, url: str) -> str:
        if has_credentials(url):
            raise ValueError("holds credentials, and a spec holds none: put the key into a variable (api_key_variable)")
        return url


class JudgeArgs(Frozen):
    """Arguments of the reward function `judge`."""

    rubric: str
    """What to judge by. How to write the score is added to it."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; the reward is the score's position between them, from 0 to 1."""
    template: str = ""
    """What the judge reads, with `{prompt}`, `{response}` and `{answer}`. If empty, the task, the response, and the
    data's reference answer, if any."""
    endpoint: HttpJudgeConfig | None = None
    """The model to ask, or None for the role `judge`."""
    cache: str = ""
    """SQLite file with answers, which are used again for the same question; if empty, each worker keeps them in
    memory."""
    max_requests: int | None = Field(default=None, ge=1)
    """Most questions that one reward worker asks, or None for no bound."""

    @field_validator("rubric")
    @classmethod
    def _has_text(cls, rubric: str) -> str:
        if not rubric.strip():
            raise ValueError("is empty")
        return rubric

    @field_validator("template")
    @classmethod
    def _names_fields(cls, template: str) -> str:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if unknown := [name for name in names if name not in FIELDS]:
            raise ValueError(f"has no field {{{unknown[0]}}}; it can have {', '.join(FIELDS)}; write {{{{ for a brace")
        if template and "response" not in names:
            raise ValueError("needs {response}")
        return template

    @model_validator(mode="after")
    def _has_scale(self) -> JudgeArgs:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: the lowest score must come first, got {self.scale}")
        return self

    def question(self, messages: str, response: str, answer: str, conversation: str) -> list[Message]:
        """The question about a response, as a conversation.

        Args:
            messages: The prompt, a JSON list of messages.
            response: Text of the response.
            answer: The reference answer; empty if there is none.
            conversation: All messages of an episode, which are then shown instead of the response; else empty.
        """
        low, high = self.scale
        how = f"End your answer with a line `Score: N`, where N is a number from {low:g} to {high:g}."
        template = self.template or (_TEMPLATE_WITH_ANSWER if answer else _TEMPLATE)
        fields = {
            "prompt": _said(messages),
            "response": _played(messages, conversation) if conversation else response,
            "answer": answer,
        }
        system = {"role": "system", "content": f"{self.rubric.strip()}\n\n{how}"}
        return [system, {"role": "user", "content": template.format_map(fields)}]

    def reward(self, answer: str) -> float:
        """The reward in a judge's answer, from 0 to 1: the last score behind its thought.

        Raises:
            JudgeError: there is no score, a range or a calculation, or one on another scale.
        """
        text = plain(visible(answer))
        found = list(_SCORE.finditer(text))
        if not found:
            raise JudgeError("no score in its answer")
        low, high = self.scale
        score, most = _number(found[-1]["score"]), 100.0 if found[-1]["percent"] else float(found[-1]["most"] or high)
        continued = _CONTINUED.match(text, found[-1].end())
        if not low <= score <= high or most != high or continued:
            written = text[found[-1].start("score") : (continued or found[-1]).end()]
            raise JudgeError(f"a score of {written} is not on the scale from {low:g} to {high:g}")
        return (score - low) / (high - low)


def _number(text: str) -> float:
    """A number with a decimal point, or a decimal comma; three digits behind a comma are thousands."""
    whole, comma, digits = text.partition(",")
    return float(f"{whole}.{digits}" if comma and len(digits) != 3 else whole + digits)


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


class HttpJudge:
    """Asks an endpoint. A request that cannot be answered is a failure of its sample alone."""

    def __init__(self, config: HttpJudgeConfig) -> None:
        """Raises JudgeError if the key's variable is not set."""
        self._config = config
        self.name = f"{config.url} {config.model} {config.temperature} {config.max_tokens}"
        self._key = os.environ.get(config.api_key_variable, "") if config.api_key_variable else "none"
        if not self._key:
            raise JudgeError(f"the environment variable {config.api_key_variable} is not set")

    def ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question."""
        return asyncio.run(self._ask(questions, timeout_s))

    async def _ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        from openai import AsyncOpenAI, OpenAIError

        config = self._config
        places = asyncio.Semaphore(config.concurrency)
        options: dict[str, Any] = {} if config.temperature is None else {"temperature": config.temperature}
        client: Any = AsyncOpenAI(base_url=config.url, api_key=self._key, max_retries=config.retries, timeout=timeout_s)

        async def one(question: list[Message]) -> JudgeAnswer:
            try:
                async with asyncio.timeout(timeout_s), places:
                    # What the endpoint sent, unread: the client accepts whatever is JSON, and text that is not.
                    response = await client.chat.completions.with_raw_response.create(
                        model=config.model, messages=question, max_tokens=config.max_tokens, **options
                    )
            except TimeoutError:
                return JudgeAnswer(failure=f"timeout after {timeout_s:g} s")
            except (OpenAIError, UnicodeError) as error:  # half a character cannot be sent
                return JudgeAnswer(failure=one_line(f"{type(error).__name__}: {error}"))
            return read_completion(response.content)

        async with client:
            return list(await asyncio.gather(*map(one, questions)))


def read_completion(body: bytes) -> JudgeAnswer:
    """The text of the first choice in the body of a response, or what the body is instead.

    Of an answer that was cut at `max_tokens`, the last word is left out.
    """
    said = body[:_SHOWN_BYTES].decode("utf-8", "replace")
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        return JudgeAnswer(failure="the endpoint's answer is not JSON", said=said)
    match completion:
        case {"choices": [{"message": {"content": str() as text}}, *_]}:
            pass
        case {"choices": [{"message": {"content": list() as parts}}, *_]}:
            text = "".join(_text_of(part) for part in parts)
        case {"choices": []} | {"choices": [{"message": {"content": None}}, *_]}:
            text = ""
        case _:
            return JudgeAnswer(failure="the endpoint's answer is not a chat completion", said=said)
    match completion:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            text = whole_words(text)
    if valid_text(text) != text:
        return JudgeAnswer(failure="an answer that is not valid text", said=text)
    return JudgeAnswer(text) if text.strip() else JudgeAnswer(failure="an empty answer", said=said)


def _text_of(part: Any) -> str:
    """The text of a part of a message; empty for a part of another type."""
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            return ""


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
        """Keeps answers; existing ones stay."""
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", answers.items())

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
        self._asked = 0

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
        conversations = [self._args.question(s.messages, s.response, s.answer, s.conversation) for s in samples]
        keys = [question_key(self._judge.name, conversation) for conversation in conversations]
        known = self._cache.find(keys)
        new = {key: question for key, question in zip(keys, conversations, strict=True) if key not in known}
        answers = {key: JudgeAnswer(text) for key, text in known.items()} | self._ask(self._judge, new)
        self._cache.add({key: answers[key].text for key in new if not answers[key].failure})
        return [self._outcome(answers[key]) for key in keys]

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _ask(self, judge: Judge, questions: dict[str, list[dict[str, object]]]) -> dict[str, JudgeAnswer]:
        """Answers by key, as far as the budget reaches."""
        budget = self._args.max_requests
        left = len(questions) if budget is None else max(0, budget - self._asked)
        asked = dict(list(questions.items())[:left])
        self._asked += len(asked)
        answers = judge.ask(list(asked.values()), self.config.timeout_s) if asked else []
        spent = JudgeAnswer(failure=f"the budget of {budget} questions of this worker is used up")
        return dict.fromkeys(questions, spent) | dict(zip(asked, answers, strict=True))

    def _outcome(self, answer: JudgeAnswer) -> RewardResult:
        if answer.failure:
            return _failed(answer.failure, answer.said[:_SHOWN])
        try:
            return RewardResult(self._args.reward(answer.text))
        except JudgeError as error:
            return _failed(str(error), answer.text[-_SHOWN:])


def _failed(reason: str, said: str = "") -> RewardResult:
    """A failure for a reason; what the judge `said` differs between failures of the same cause."""
    return RewardResult(None, f"judge: {reason}" + (f": {said!r}" if said else ""), cause=f"judge: {reason}")

"""Builds a judge's question and reads its score."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from troupe.workers.contract.config import Frozen, first_problem
from troupe.workers.contract.environments import Message
from troupe.workers.contract.imports import PackageMissing, require_package
from troupe.workers.contract.text import has_credentials
from troupe.workers.rewards.answer_text import plain, visible

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

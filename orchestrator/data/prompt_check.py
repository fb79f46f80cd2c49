"""Prompts against the tokenizer before anything starts: the chat template renders them, and they leave room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.data.prompts import Pool
from orchestrator.spec.base import RunSpec
from orchestrator.spec.offline import OfflineSpec
from orchestrator.spec.preflight import Finding
from orchestrator.spec.probe import ProbeFailed, ask
from orchestrator.spec.rollout import RolloutSpec

PROMPTS = 100
"""Prompts that are rendered: the first ones."""
_ENTRY = "workers.data.prompt_probe:measure"
_TIMEOUT_S = 120.0
_LONGEST = 1 << 31


@dataclass(frozen=True)
class _Room:
    """Tokens that a prompt may have."""

    tokens: int
    field: str
    words: str


@dataclass(frozen=True)
class PromptCheck:
    """What rendering the first prompts found."""

    problems: tuple[Finding, ...] = ()
    """What no prompt survives, by the dotted path of the field."""
    lines: tuple[str, ...] = ()
    """What some prompts do not survive."""


def check_prompts(spec: RunSpec, train: Pool) -> PromptCheck:
    """Render the first prompts of the training data in another process, as the model's workers will.

    A model that does not exist yet (an earlier stage of a chain writes it) is not checked.
    """
    if not (Path(spec.model.path) / "config.json").is_file():
        return PromptCheck()
    messages = train.table.column("messages").slice(0, PROMPTS).to_pylist()
    template = "model.path" if spec.model.chat_template is None else "model.chat_template"
    request = {"model": spec.model.model_dump(mode="json"), "messages": messages, "longest": _LONGEST}
    try:
        replies = ask(_ENTRY, request, _TIMEOUT_S)
    except ProbeFailed as error:
        return PromptCheck((("model.path", error.raised or str(error)),))
    return judge(
        replies, template, spec.dispatch(_room_of_rollouts, _room_of_examples), train.table.column("origin").to_pylist()
    )


def judge(replies: Sequence[int | str], template: str, room: _Room, origins: Sequence[str]) -> PromptCheck:
    """What the lengths of prompts (or why they have none) mean: a problem if it is so for all, else a line."""
    count = f"the first {len(replies)} prompts of data.train"
    refused = [(origin, reply) for origin, reply in zip(origins, replies, strict=False) if isinstance(reply, str)]
    if len(refused) == len(replies):
        return PromptCheck(((template, f"the chat template renders none of {count}: {': '.join(refused[0])}"),))
    long = [reply for reply in replies if isinstance(reply, int) and reply > room.tokens]
    too_long = f"more than the {room.tokens} tokens that {room.words} (longest: {max(long, default=0)})"
    if len(long) + len(refused) == len(replies):
        return PromptCheck(((room.field, f"{count} have {too_long}"),))
    lines = [f"{len(refused)} of {count} are not rendered: {': '.join(refused[0])}"] if refused else []
    lines += [f"{len(long)} of {count} have {too_long}; such prompts are dropped"] if long else []
    return PromptCheck((), tuple(lines))


def _room_of_rollouts(spec: RolloutSpec) -> _Room:
    longest, response = spec.roles.rollout.max_model_len, spec.sampling.max_tokens
    words = f"roles.rollout.max_model_len {longest} leaves beside sampling.max_tokens {response}"
    return _Room(longest - response, "roles.rollout.max_model_len", words)


def _room_of_examples(spec: OfflineSpec) -> _Room:
    words = f"data.max_length {spec.data.max_length} leaves beside a response of one token"
    return _Room(spec.data.max_length - 1, "data.max_length", words)

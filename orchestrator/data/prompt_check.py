"""Prompts against the tokenizer before anything starts: the chat template renders them, and they leave room."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from troupe.orchestrator.data.calls import CALLED
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.summary import Pools, by_source, is_held_out
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sizes import PromptRoom, prompt_room
from troupe.workers.contract.environments import CALLS, ENVIRONMENTS, RESULTS, TOOLS, dropped_note
from troupe.workers.isolation.interpreters import NoInterpreter, interpreter_of
from troupe.workers.isolation.probe import ProbeFailed, ask

PROMPTS = 100
"""Prompts of a section that are rendered to see whether any can be used: the first ones."""
COUNTED = 20_000
"""Most prompts of a section that are rendered to count unusable ones."""
_COUNT_S = 20.0
"""Time for rendering prompts."""
_ENTRY = "troupe.workers.data.tokenizer_probe:measure"
_TIMEOUT_S = 120.0
_IMPORT_S = 30.0
"""Time for the imports of an environment, besides that of its first turn."""
_READ_AS_TEXT = "which are read as text; where they are meant as tokens, set model.allow_special: true"
_UNNAMED = (
    "which the model's folder does not name as an end: sampling stops there as well, and the generation configuration "
    "and the tokenizer of every exported model name it"
)
_SPELLED = (
    "which is no token of the vocabulary: sampling does not stop there. Use the tokenizer of the template's model, or "
    "set sampling.stop to it"
)
_UNMEASURED = (
    "prompts are measured without its tools and its system message, so that some may be too long in a run, which drops "
    "them"
)
_LONGEST = 1 << 31


class _Offer(NamedTuple):
    """What an environment adds to its prompts, the tools as JSON; or why it is not known."""

    system: str = ""
    tools: str | None = None
    note: str = ""


@dataclass(frozen=True)
class PromptCheck:
    """What rendering the first prompts found."""

    problems: tuple[Finding, ...] = ()
    """What no prompt survives, by the dotted path of the field."""
    lines: tuple[str, ...] = ()
    """What some prompts do not survive."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Unusable prompts among the rendered ones, by the name of their section in `data`."""


def check_prompts(spec: RunSpec, pools: Pools, most: int = PROMPTS) -> PromptCheck:
    """Render the first prompts of training and evaluation in another process, as workers will; at most `most` of
    each section, as far as the time suffices. A model that an earlier stage writes is not checked."""
    if not (Path(spec.model.path) / "config.json").is_file():
        return PromptCheck()
    # `data.eval`, the smaller one, comes first: if the time ends, less is left out.
    parts = by_source(pools)
    held_out = [name for name in parts if is_held_out(name)]
    sections = held_out + [name for name in parts if name.partition(".")[0] == "train"]
    rooms = {name: prompt_room(spec, name) for name in sections}
    offers = {one: _offered(spec, one) for one in dict.fromkeys(room.environment for room in rooms.values())}
    seen = {name: _as_seen(parts[name], offers[rooms[name].environment], most) for name in sections}
    messages = {name: prompts for name, (prompts, _) in seen.items()}
    request = {"model": spec.model.model_dump(mode="json"), "longest": _LONGEST, "seconds": _COUNT_S}
    texts = {"messages": [*chain(*messages.values())], "answers": [*_answers(pools, most)]}
    texts |= {"tools": [*chain.from_iterable(tools for _, tools in seen.values())]}
    texts |= {"responses": [*chain.from_iterable(_responses(spec, parts[name], most) for name in sections)]}
    try:
        replies = iter(ask(_ENTRY, request | texts, _TIMEOUT_S))
    except ProbeFailed as error:
        return PromptCheck((("model.path", error.raised or str(error)),))
    unnamed, spelled, dropped, special, answers = (next(replies) for _ in range(5))
    notes = [f"the chat template ends a turn with {unnamed!r}, {_UNNAMED}"] if unnamed else []
    stops = () if spec.rollouts is None else spec.rollouts.sampling.stop
    notes += [f"the chat template ends a turn with {spelled!r}, {_SPELLED}"] if spelled and spelled not in stops else []
    notes += [*_unseen_tools(spec, dropped.split(";")), *(offer.note for offer in offers.values() if offer.note)]
    notes += [f"{special} of the first prompts have special tokens, {_READ_AS_TEXT}"] if special else []
    notes += [f"{answers} of the first answers and texts have special tokens, {_READ_AS_TEXT}"] if answers else []
    template = "model.path" if spec.model.chat_template is None else "model.chat_template"
    found = {}
    for name, prompts in messages.items():
        own = list(islice(replies, len(prompts)))
        found[name] = classify(name, own, template, rooms[name], _first(parts[name], "origin", most))
    checks = [found[name] for name in (*sections[len(held_out) :], *held_out)]
    checks += [_unseen_in_examples(name, parts[name], dropped.split(";"), template, most) for name in sections]
    problems: dict[str, str] = {}
    for path, problem in (finding for check in checks for finding in check.problems):
        problems.setdefault(path, problem)  # what is wrong for both is said once
    refused: dict[str, int] = {}
    for section, count in (item for check in checks for item in check.refused.items()):
        whole = section if is_held_out(section) else section.partition(".")[0]  # a mixture is counted as a whole
        refused[whole] = refused.get(whole, 0) + count
    lines = (*notes, *(line for check in checks for line in check.lines))
    return PromptCheck(tuple(problems.items()), lines, refused)


def _unseen_tools(spec: RunSpec, dropped: Sequence[str]) -> Iterator[str]:
    """What the policy does not see of tools and calls, for each environment with a parser of calls. Tools can be in
    the system message; the history of all environments but an agent has calls as they were sampled."""
    for name, role in ({} if spec.rollouts is None else spec.rollouts.roles.environments()).items():
        described = {TOOLS} if role.args.get("system") else set[str]()
        own = described | (set[str]() if role.name == "agent" else {CALLS})
        note = dropped_note([one for one in dropped if one and one not in own])
        if role.tool_parser is not None and note:
            yield f"roles.environment{name and '.'}{name}: {note}"


def _unseen_in_examples(name: str, pool: Pool, dropped: Sequence[str], template: str, most: int) -> PromptCheck:
    """What the template does not render of the tools and calls of examples."""
    marks, lost = {CALLS: CALLED, RESULTS: '"role": "tool"'}, list[set[str]]()
    columns = ["tools", "messages", "responses"]
    for row in pool.table.slice(0, most).select(columns).to_pylist() if "tools" in pool.table.column_names else []:
        text = "".join([row["messages"], *row["responses"]])
        used = {what for what, mark in marks.items() if mark in text} | ({TOOLS} if row["tools"] else set())
        lost.append(used & {*dropped})
    if not any(lost):
        return PromptCheck()
    count = f"{sum(map(bool, lost))} of the first {len(lost)} examples of data.{name}"
    line = (
        f"{count} have {', '.join(sorted(set().union(*lost)))}, which the chat template does not render; such examples "
        "are bad rows. Set model.chat_template to one that does"
    )
    return PromptCheck(((template, line),)) if all(lost) else PromptCheck((), (line,))


def _as_seen(pool: Pool, offer: _Offer, most: int) -> tuple[list[str], list[str | None]]:
    """The first prompts of a pool as the engine or the trainer sees them, and the tools of each, as JSON."""
    prompts = _first(pool, "messages", most)
    if "tools" in pool.table.column_names:
        return prompts, _first(pool, "tools", most)
    before = [{"role": "system", "content": offer.system}] if offer.system else []
    return [json.dumps([*before, *json.loads(prompt)]) for prompt in prompts], [offer.tools for _ in prompts]


def _offered(spec: RunSpec, environment: str | None) -> _Offer:
    """What an environment adds to its prompts. The servers of its tools are started, and end."""
    if environment is None or spec.rollouts is None:
        return _Offer()
    role = spec.rollouts.roles.environments()[environment]
    if role.name not in ENVIRONMENTS or not ENVIRONMENTS[role.name].offers_tools:
        return _Offer()
    entry = f"troupe.workers.agents.environments.{role.name}:offered"
    try:
        python = interpreter_of(role.name, role.python)
        return _Offer(*ask(entry, role.args, _IMPORT_S + role.turn_timeout_s, python))
    except (NoInterpreter, ProbeFailed) as error:
        why = error.raised if isinstance(error, ProbeFailed) and error.raised else error
        return _Offer(note=f"roles.environment{environment and '.'}{environment}: {_UNMEASURED}: {why}")


def _responses(spec: RunSpec, pool: Pool, most: int) -> list[str | None]:
    """The text of the longest response of each example, without what a template writes between turns, or None."""
    if spec.offline is None:
        return [None for _ in _first(pool, "messages", most)]
    whole = "steps" in spec.offline.row.formats  # the responses are the steps of one
    texts = (
        ["".join(turn["content"] for turn in json.loads(turns)) for turns in responses]
        for responses in _first(pool, "responses", most)
    )
    return ["".join(own) if whole else max(own, key=len) for own in texts]


def _answers(pools: Pools, most: int) -> Iterator[str]:
    """The answers of the first rows, and the texts of `data.ptx`, as JSON."""
    for name in pools:
        columns = pools[name].table.column_names
        if "responses" in columns:  # JSON
            yield from chain.from_iterable(_first(pools[name], "responses", most))
        if "candidates" in columns:
            yield from map(_json, chain.from_iterable(filter(None, _first(pools[name], "candidates", most))))
        if "text" in columns:
            yield from map(_json, _first(pools[name], "text", most))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _first(pool: Pool, column: str, most: int) -> list[Any]:
    return pool.table.column(column).slice(0, most).to_pylist()


def classify(
    name: str, replies: Sequence[int | str], template: str, room: PromptRoom, origins: Sequence[str]
) -> PromptCheck:
    """What the lengths of prompts (or why they have none) mean: a problem if it is so for all, else a line."""
    if not replies:
        return PromptCheck()
    count = f"the first {len(replies)} prompts of data.{name}"
    refused = [(origin, reply) for origin, reply in zip(origins, replies, strict=False) if isinstance(reply, str)]
    if len(refused) == len(replies):
        return PromptCheck(((template, f"the chat template renders none of {count}: {': '.join(refused[0])}"),))
    long = [reply for reply in replies if isinstance(reply, int) and reply > room.tokens]
    too_long = f"more than the {room.tokens} tokens that {room.words} (longest: {max(long, default=0)})"
    if len(long) + len(refused) == len(replies):
        return PromptCheck(((room.field, f"{count} have {too_long}"),))
    lines = [f"{len(refused)} of {count} are not rendered: {': '.join(refused[0])}"] if refused else []
    lines += [f"{len(long)} of {count} have {too_long}; such prompts are dropped"] if long else []
    return PromptCheck((), tuple(lines), {name: len(long) + len(refused)})

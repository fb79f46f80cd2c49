"""Prompts that a teacher reads in place of the policy's, with a hint, the answer, feedback or a demonstration (SDFT,
OPSD, SDPO)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa
import torch

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.environments import Message
from troupe.workers.contract.messages import RankPlan, SampleKey, ScoreSummary, identities, kind_of
from troupe.workers.contract.rewards import is_solved
from troupe.workers.contract.templates import DEMONSTRATION, FEEDBACK, template_fields
from troupe.workers.data.chat import PromptRefused, encode_prompt
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.models.ragged import ragged

_COLUMNS, _KINDS = ["messages", "answer", "metadata", "conversation"], ("rollouts", "rewards")
Told = Mapping[SampleKey, tuple[tuple[str, str], ...]]
"""What a teacher reads of samples besides their rows: (field, text), of samples that have at least one of the texts."""
Score = Callable[[RankPlan, Sequence[pa.Table]], tuple[ScoreSummary, pa.Table]]
"""Scores the plan's rows of tables under a model."""


class _Read(NamedTuple):
    """What the teacher's prompt of a row is made of."""

    messages: str
    answer: str
    metadata: str
    conversation: str
    told: tuple[tuple[str, str], ...]
    prompt_ids: tuple[int, ...]
    """The policy's prompt in an episode, else empty."""


class TeacherPrompts:
    """Writes prompts by a template and tokenizes them as the engines tokenize the policy's."""

    def __init__(self, template: str, model: ModelConfig, longest: int, micro_batch_tokens: int) -> None:
        """`model` has the policy's tokenizer and template; `longest`: most tokens of prompt and response."""
        self._template = template
        self._tokenizer = load_chat_tokenizer(model)
        self._longest = longest
        self._micro_batch_tokens = micro_batch_tokens

    def score(
        self, score: Score, plan: RankPlan, rollouts: Sequence[pa.Table], told: Told | None = None
    ) -> tuple[ScoreSummary, pa.Table]:
        """Scores the plan's rows behind the teacher's prompts, in smaller micro-batches if these are longer. `told`: of
        the samples, if the template has such fields; the others have no scores and are `untaught`."""
        table, untaught = pa.concat_tables(rollouts), dict[SampleKey, None]()
        if told is not None:
            keys = [key[:2] for key in identities(table)]
            untaught = dict.fromkeys(keys[row] for part in plan.micro_batches for row in part if keys[row] not in told)
            parts = (tuple(row for row in part if keys[row] not in untaught) for part in plan.micro_batches)
            plan = replace(plan, micro_batches=tuple(parts))
        rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
        table, failed = self.apply(table, rows, told)
        lengths = sum(ragged(table.column(name)).lengths for name in ("prompt_ids", "response_ids"))
        summary, scores = score(within(plan, torch.as_tensor(lengths).tolist(), self._micro_batch_tokens), [table])
        return replace(summary, failed={**summary.failed, **failed}, untaught=tuple(untaught)), scores

    def apply(
        self, rollouts: pa.Table, rows: Iterable[int], told: Told | None = None
    ) -> tuple[pa.Table, dict[SampleKey, str]]:
        """The rollouts with the teacher's prompts in these rows, and why samples have none, which keep the policy's."""
        prompts, keys = rollouts.column("prompt_ids").to_pylist(), identities(rollouts)
        responses = ragged(rollouts.column("response_ids")).lengths.tolist()
        parts = rollouts.select(_COLUMNS).to_pylist()
        encoded: dict[_Read, list[int] | PromptRefused] = {}
        failed: dict[SampleKey, str] = {}
        for row in (row for row in rows if responses[row]):  # of a player without a turn there is nothing to score
            own = () if told is None else told[keys[row][:2]]
            shown = tuple(prompts[row]) if parts[row]["conversation"] else ()
            read = _Read(**parts[row], told=own, prompt_ids=shown)
            if read not in encoded:
                encoded[read] = self._encode(read)
            found = encoded[read]
            if isinstance(found, PromptRefused):
                failed[keys[row][:2]] = f"its prompt: {found}"
            elif len(found) + responses[row] > self._longest:
                failed[keys[row][:2]] = f"its prompt and the response have more than {self._longest} tokens"
            else:
                prompts[row] = found
        index = rollouts.schema.get_field_index("prompt_ids")
        column = rollouts.schema.field(index)
        return rollouts.set_column(index, column, pa.array(prompts, column.type)), failed

    def _encode(self, row: _Read) -> list[int] | PromptRefused:
        try:
            turns = self._shown(row) if row.conversation else json.loads(row.messages)
            last = max((number for number, turn in enumerate(turns) if turn["role"] == "user"), default=None)
            if last is None:
                raise PromptRefused("it has no message of the user")
            columns = {name: v if isinstance(v, str) else json.dumps(v) for name, v in json.loads(row.metadata).items()}
            fields = columns | {"prompt": turns[last]["content"], "answer": row.answer, **dict(row.told)}
            if missing := [name for name in template_fields(self._template) if name not in fields]:
                raise PromptRefused(f"the row has no column {missing[0]}")
            turns[last] |= {"content": self._template.format_map(fields)}
            return encode_prompt(self._tokenizer, json.dumps(turns), self._longest)
        except PromptRefused as error:
            return error

    def _shown(self, row: _Read) -> list[Message]:
        """The messages that the prompt of a row of an episode was made of: those before a turn of the policy whose
        tokens it is. Raises PromptRefused if there are none."""
        conversation = json.loads(row.conversation)
        for turn in (place for place, message in enumerate(conversation) if message["role"] == "assistant"):
            with contextlib.suppress(PromptRefused):
                if encode_prompt(self._tokenizer, json.dumps(conversation[:turn]), sys.maxsize) == [*row.prompt_ids]:
                    return conversation[:turn]
        raise PromptRefused("it is not made of the episode's messages alone: it has tools, or no chat template")


def told_in(template: str, least: float, tables: Sequence[pa.Table]) -> Told:
    """What the fields of a template tell of the samples of ROLLOUTS and REWARDS tables. The demonstration of a sample
    is the response of another one of its group with the highest reward, if that is at least `least`; of equal ones, the
    first (SDPO, arXiv 2601.20802, sec. 3)."""
    rollouts, rewards = (pa.concat_tables([one for one in tables if kind_of(one) == kind]) for kind in _KINDS)
    keys = [key[:2] for key in identities(rewards)]
    responses = dict(zip((key[:2] for key in identities(rollouts)), rollouts["response"].to_pylist(), strict=True))
    best: dict[str, list[tuple[float, int]]] = {}
    for (uid, index), reward in zip(keys, rewards["reward"].to_pylist(), strict=True):
        if reward is not None and is_solved(reward, least):
            best[uid] = sorted([*best.get(uid, ()), (-reward, index)])[:2]
    fields = [name for name in (FEEDBACK, DEMONSTRATION) if name in template_fields(template)]
    told: dict[SampleKey, tuple[tuple[str, str], ...]] = {}
    for (uid, index), text in zip(keys, rewards[FEEDBACK].to_pylist(), strict=True):
        others = [responses[uid, other] for _, other in best.get(uid, ()) if other != index]
        texts = {FEEDBACK: text or "", DEMONSTRATION: others[0] if others else ""}
        own = tuple((name, texts[name]) for name in fields)
        if any(text for _, text in own):
            told[uid, index] = own
    return told


def within(plan: RankPlan, tokens: Sequence[int], most: int) -> RankPlan:
    """The plan with micro-batches of at most `most` tokens, padding included; one longer row is alone."""
    parts: list[tuple[int, ...]] = []
    for rows in plan.micro_batches:
        part: tuple[int, ...] = ()
        for row in rows:
            own = [tokens[one] for one in (*part, row)]
            if part and (sum(own) if plan.packed else max(own) * len(own)) > most:
                parts.append(part)
                part = ()
            part += (row,)
        parts.append(part)
    return replace(plan, micro_batches=tuple(parts))

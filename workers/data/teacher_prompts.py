"""Prompts that a teacher reads in place of the policy's, with a hint, the answer or feedback (SDFT, OPSD, SDPO)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import torch

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary, identities
from troupe.workers.contract.templates import FEEDBACK, template_fields
from troupe.workers.data.chat import PromptRefused, encode_prompt
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.models.ragged import ragged

_COLUMNS = ("messages", "answer", "metadata")
Feedback = Mapping[tuple[str, int], str]
"""What the reward functions say of samples, by (prompt_uid, sample_index)."""
Score = Callable[[RankPlan, Sequence[pa.Table]], tuple[ScoreSummary, pa.Table]]
"""Scores the plan's rows of tables under a model."""


class TeacherPrompts:
    """Writes prompts by a template and tokenizes them as the engines tokenize the policy's."""

    def __init__(self, template: str, model: ModelConfig, longest: int, micro_batch_tokens: int) -> None:
        """`model` has the policy's tokenizer and template; `longest`: most tokens of prompt and response."""
        self._template = template
        self._tokenizer = load_chat_tokenizer(model)
        self._longest = longest
        self._micro_batch_tokens = micro_batch_tokens

    def score(
        self, score: Score, plan: RankPlan, rollouts: Sequence[pa.Table], feedback: Feedback | None = None
    ) -> tuple[ScoreSummary, pa.Table]:
        """Scores the plan's rows behind the teacher's prompts, in smaller micro-batches if these are longer.
        `feedback`: of the samples, if the template has it; the others have no scores and are `untaught`."""
        table, untaught = pa.concat_tables(rollouts), dict[tuple[str, int], None]()
        if feedback is not None:
            keys = [key[:2] for key in identities(table)]
            untaught = dict.fromkeys(
                keys[row] for part in plan.micro_batches for row in part if not feedback.get(keys[row])
            )
            parts = (tuple(row for row in part if keys[row] not in untaught) for part in plan.micro_batches)
            plan = replace(plan, micro_batches=tuple(parts))
        rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
        table, failed = self.apply(table, rows, feedback)
        lengths = sum(ragged(table.column(name)).lengths for name in ("prompt_ids", "response_ids"))
        summary, scores = score(within(plan, torch.as_tensor(lengths).tolist(), self._micro_batch_tokens), [table])
        return replace(summary, failed={**summary.failed, **failed}, untaught=tuple(untaught)), scores

    def apply(
        self, rollouts: pa.Table, rows: Iterable[int], feedback: Feedback | None = None
    ) -> tuple[pa.Table, dict[tuple[str, int], str]]:
        """The rollouts with the teacher's prompts in these rows, and why samples have none, which keep the policy's."""
        prompts, keys = rollouts.column("prompt_ids").to_pylist(), identities(rollouts)
        responses = ragged(rollouts.column("response_ids")).lengths.tolist()
        parts = list(zip(*(rollouts.column(name).to_pylist() for name in _COLUMNS), strict=True))
        encoded: dict[tuple[str, ...], list[int] | PromptRefused] = {}
        failed: dict[tuple[str, int], str] = {}
        for row in rows:
            read = parts[row] if feedback is None else (*parts[row], feedback[keys[row][:2]])
            if read not in encoded:
                encoded[read] = self._encode(*read)
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

    def _encode(self, messages: str, answer: str, metadata: str, feedback: str = "") -> list[int] | PromptRefused:
        turns = json.loads(messages)
        last = max(number for number, turn in enumerate(turns) if turn["role"] == "user")
        columns = {name: v if isinstance(v, str) else json.dumps(v) for name, v in json.loads(metadata).items()}
        fields = columns | {"prompt": turns[last]["content"], "answer": answer, FEEDBACK: feedback}
        if missing := [name for name in template_fields(self._template) if name not in fields]:
            return PromptRefused(f"the row has no column {missing[0]}")
        turns[last] |= {"content": self._template.format_map(fields)}
        try:
            return encode_prompt(self._tokenizer, json.dumps(turns), self._longest)
        except PromptRefused as error:
            return error


def feedback_in(rewards: pa.Table) -> Feedback:
    """The feedback of the samples of a REWARDS table that have some."""
    texts = rewards.column(FEEDBACK).to_pylist()
    return {key[:2]: text for key, text in zip(identities(rewards), texts, strict=True) if text}


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

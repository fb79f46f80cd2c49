"""Offline data: from texts to rows of tokens, and from a table of examples to the batch of one step."""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from troupe.workers.algorithms.preference_losses import Groups, divergence_masks
from troupe.workers.contract.messages import TEACHER_WEIGHTS, RankPlan, TrainRow, identities
from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.contract.offline_messages import (
    EXAMPLE_BATCH,
    EXAMPLES,
    TEACHER_SCORES,
    ExampleBatchSummary,
    ExampleSummary,
)
from troupe.workers.data.chat import PromptRefused, encode_prompt
from troupe.workers.data.plain_text import MARK, as_text, response_text, restored, text_ids, token_counts
from troupe.workers.data.template_forms import as_read
from troupe.workers.data.tokenizer import outside_embedding, render, render_as_text, token_ids
from troupe.workers.data.turn_ends import turn_ends, without_end
from troupe.workers.models.ragged import ragged
from troupe.workers.models.token_batch import TokenBatch, TokenTable, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REPORTED = 20

_REWRITTEN = (
    "the chat template renders earlier turns differently when others follow: no text of the whole conversation has "
    "the tokens that were sampled (sft, kto: loss_on: last trains the last turn)"
)
_OF_CALLS = (
    "the chat template renders a turn with calls without its text, its thought, some of its calls or an end: set "
    "model.chat_template to one that keeps them (sft, kto: loss_on: last trains the last turn)"
)

Picks = Sequence[tuple[str, int]]
"""(prompt_uid, number of the example) of every example of a batch, in order."""


class ExampleRefused(ValueError):
    """This example cannot be used; other examples are not affected."""


def encode_response(
    tokenizer: PreTrainedTokenizerBase, messages: str, prompt_ids: Sequence[int], response: str
) -> list[int]:
    """Token ids of the assistant's response to `messages`, to the end of its turn. Raises as `encode_turns`."""
    return encode_turns(tokenizer, messages, prompt_ids, [{"role": "assistant", "content": response}])[0]


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: str,
    prompt_ids: Sequence[int],
    turns: Sequence[dict[str, Any]],
    tools: str | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids of the turns that follow `messages`, and a loss mask: True for the assistant's, unless their `weight`
    is 0. The first and the last turn are the assistant's and have a loss.
    The prompt's ids are those of a rollout. Prompt and turns are the template's rendering of the conversation up to
    the end of the last turn: what it writes into the assistant's turns (an empty thought) is part of them, what it
    writes between has no loss. Without an end the last turn ends with the end-of-sequence token. A turn whose first
    tokens would merge with those before is tokenized alone, as a policy samples it. Raises ExampleRefused if the
    rendering does not continue a turn's prompt or lacks its text, the template fails, nothing defines a turn's end,
    or a token has no embedding."""
    said, trained = json.loads(messages), [turn["role"] == "assistant" and turn.get("weight") != 0 for turn in turns]
    offered = json.loads(tools) if tools else None
    unweighed = ({name: value for name, value in turn.items() if name != "weight"} for turn in turns)
    try:
        shown = as_read(tokenizer, [*said, *unweighed], offered)
    except ValueError as error:
        raise ExampleRefused(str(error)) from error
    said, turns = shown[: len(said)], shown[len(said) :]
    whole = _render(tokenizer, shown, offered, open_turn=False)
    ids: list[int] = []
    mask: list[bool] = []
    end = 0
    for place, turn in enumerate(turns):
        if not trained[place]:
            continue
        opened = _render(tokenizer, [*said, *turns[:place]], offered, open_turn=True)
        behind, own = _behind(tokenizer, shown, len(said) + place, offered, whole)
        closing, last = _closing(tokenizer, own), place == len(turns) - 1
        rest = closing or (own.rstrip() if last and "tool_calls" in turn else "")
        _check_shown(whole, opened, behind, rest, turn, last=last)
        if end > len(opened):
            raise ExampleRefused(_REWRITTEN)  # what counts as the end of a turn is in a later message
        if ids:
            between = _continuation(tokenizer, whole[:end], [*prompt_ids, *ids], whole[end : len(opened)])
            ids, mask = [*ids, *between], [*mask, *(False for _ in between)]
        end = len(whole) - len(behind) + len(rest)
        reply = _continuation(tokenizer, opened, [*prompt_ids, *ids], whole[len(opened) : end])
        if not closing and last:
            reply = [*reply, _own_end(tokenizer)]
        ids, mask = [*ids, *reply], [*mask, *(True for _ in reply)]
        if closing and ids[-1] not in turn_ends(tokenizer).ids:
            mask[-1] = False  # the template closes an earlier turn with a token at which sampling does not stop
    if why := outside_embedding(tokenizer, ids):
        raise ExampleRefused(why)
    return ids, mask


def encode_conversation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation, up to where `encode_turns` ends: there a reward model reads its score. One that
    does not end with the assistant's text ends as the template writes it, which can raise anything."""
    shown = as_text(tokenizer, messages)
    whole = render_as_text(tokenizer, shown, open_turn=False)
    last = shown[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        return token_ids(tokenizer, whole)
    last["content"] += MARK
    _, mark, behind = render_as_text(tokenizer, shown, open_turn=False).rpartition(MARK)
    if not mark or not whole.endswith(behind):
        return token_ids(tokenizer, whole)
    closing, own = _closing(tokenizer, behind), turn_ends(tokenizer).own
    ids = token_ids(tokenizer, whole[: len(whole) - len(behind) + len(closing)])
    return ids if closing or own is None else [*ids, own]


def _behind(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], number: int, tools: list[Any] | None, whole: str
) -> tuple[str, str]:
    """What the template writes behind the text of a turn: to the end of the conversation, and to the next message. The
    text of a turn with calls ends with the name of its last one, which every template writes once in the turn."""

    shown, offered = as_text(tokenizer, messages), as_text(tokenizer, tools)

    def marked(part: dict[str, Any], key: str, text: str) -> str:
        """The rendering with another text in a part of a message."""
        original, part[key] = part[key], text
        rendered = _rendered(partial(render_as_text, tokenizer, shown, open_turn=False, tools=offered))
        part[key] = original
        return rendered

    if calls := shown[number].get("tool_calls"):
        called = calls[-1]["function"]
        _, mark, behind = marked(called, "name", called["name"] + MARK).partition(MARK)
        behind = behind.replace(MARK, "") if mark else whole  # results may have the name as well
    else:
        behind = marked(shown[number], "content", shown[number]["content"] + MARK).rpartition(MARK)[2]
    if number == len(shown) - 1:
        return behind, behind
    following = shown[number + 1]
    before, mark, _ = marked(following, "content", MARK + following["content"]).rpartition(MARK)
    own = before[len(whole) - len(behind) :]
    if not mark or not behind.startswith(own):  # the template leaves out the beginning of the next message
        raise ExampleRefused(_REWRITTEN)
    return behind, own


def _check_shown(whole: str, opened: str, behind: str, rest: str, turn: dict[str, Any], *, last: bool) -> None:
    """Verify that a rendering continues the prompt of a turn with what the turn has. Raises ExampleRefused."""
    text = whole.removesuffix(behind)
    continued = whole.startswith(opened) and len(opened) <= len(text) == len(whole) - len(behind)
    own, calls = _packed(whole[len(opened) : len(text) + len(rest)]), "tool_calls" in turn
    content, thought = _packed(turn["content"]), _packed(turn.get("reasoning_content", ""))
    kept = bool(rest) and content in own if calls else _packed(text).endswith(content)
    if continued and kept and thought in own:
        return
    if calls:
        raise ExampleRefused(_OF_CALLS)
    if not last:
        raise ExampleRefused(_REWRITTEN)
    opens = f"opens the response with {opened[-24:]!r}, and does not have that in the whole conversation"
    changes = "leaves out reasoning_content" if kept else "changes the text of the response"
    why = changes if continued else opens
    raise ExampleRefused(f"the chat template {why}: set model.chat_template to one that keeps responses as they are")


def _packed(text: str) -> str:
    """The text as it is in the data, without white space."""
    return "".join(restored(text).split())


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, *, open_turn: bool
) -> str:
    return _rendered(partial(render, tokenizer, messages, open_turn=open_turn, tools=tools))


def _rendered(rendering: Callable[[], str]) -> str:
    try:
        return rendering()
    except Exception as error:  # a chat template can raise anything
        raise ExampleRefused(f"{type(error).__name__}: {error}") from error


def _continuation(tokenizer: PreTrainedTokenizerBase, before: str, before_ids: Sequence[int], text: str) -> list[int]:
    """Tokens of a text that follows another; it is tokenized alone if the two would merge."""
    whole = token_ids(tokenizer, before + text)
    if whole[: len(before_ids)] == list(before_ids):
        return whole[len(before_ids) :]
    return text_ids(tokenizer, text)


def _closing(tokenizer: PreTrainedTokenizerBase, behind: str) -> str:
    """The beginning of the text behind a turn, up to the token that ends it; empty if the template writes none."""
    ends = turn_ends(tokenizer)
    texts = sorted({*ends.written, *ends.texts}, key=len, reverse=True)
    found = re.search("|".join(map(re.escape, texts)), behind) if texts else None
    return behind[: found.end()] if found else ""


def _own_end(tokenizer: PreTrainedTokenizerBase) -> int:
    end = turn_ends(tokenizer).own
    if end is None:
        raise ExampleRefused("neither the chat template nor the tokenizer defines which token ends a turn")
    return end


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: pa.Table, config: ExampleConfig
) -> tuple[ExampleSummary, pa.Table]:
    """(summary, EXAMPLES table) of an EXAMPLE_TEXTS table; examples that do not fit are omitted and reported."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    usable = refused = tokens = 0
    sources: Counter[str] = Counter()
    for example in texts.to_pylist():
        try:
            prompt_ids, responses, masks = _encode(tokenizer, example, config)
        except (PromptRefused, ExampleRefused) as error:
            refused += 1
            if len(problems) < MAX_REPORTED:
                problems.append(f"{example['origin']}: {error}")
            continue
        # Without scores the responses are best first, and none are tied.
        scores = example["scores"] or [-float(place) for place in range(len(responses))]
        labels = {"step_labels": scores if config.steps else None}
        for member, (ids, mask) in enumerate(zip(responses, masks, strict=True)):
            row = {"example": usable, "member": member, "score": 0.0 if config.steps else scores[member], **labels}
            row |= {"prompt_ids": prompt_ids, "response_ids": ids, "loss_mask": mask}
            rows.append(row | {name: example[name] for name in ("margin", "desirable")})
            tokens += len(prompt_ids) + len(ids)
        usable += 1
        if (source := example.get("source")) is not None:
            sources[source] += 1
    table = pa.Table.from_pylist(rows, schema=EXAMPLES)
    return ExampleSummary(usable, tokens, refused, tuple(problems), dict(sources)), table


def _encode(
    tokenizer: PreTrainedTokenizerBase, example: dict[str, Any], config: ExampleConfig
) -> tuple[list[int], list[list[int]], list[list[bool]]]:
    """Prompt ids, and the ids and the loss mask of every response. Raises PromptRefused, ExampleRefused."""
    messages, tools = example["messages"], example["tools"]
    prompt_ids = encode_prompt(tokenizer, messages, config.max_length - 1, tools)
    responses = list(map(json.loads, example["responses"]))
    if config.steps:
        encoded = [_encode_steps(tokenizer, messages, prompt_ids, [turns[0]["content"] for turns in responses], tools)]
    else:
        encoded = [encode_turns(tokenizer, messages, prompt_ids, turns, tools) for turns in responses]
    responses, masks = [ids for ids, _ in encoded], [mask for _, mask in encoded]
    longest = len(prompt_ids) + max(map(len, responses))
    if longest > config.max_length:
        raise ExampleRefused(f"prompt and response have {longest} tokens, more than {config.max_length}")
    if len(responses) * longest > config.micro_batch_tokens:
        # The responses are compared, so they stay in one micro-batch. The spec's checks ensure that pairs fit.
        raise ExampleRefused(
            f"{len(responses)} answers, {longest} tokens the longest with its prompt, take {len(responses) * longest}, "
            f"more than roles.policy.micro_batch_tokens, {config.micro_batch_tokens}"
        )
    if len({tuple(ids) for ids in responses}) < len(responses):
        raise ExampleRefused("two responses have the same tokens and cannot be compared")
    if config.from_divergence:
        masks = [list(map(operator.and_, *pair)) for pair in zip(masks, divergence_masks(responses), strict=True)]
    return prompt_ids, responses, masks


def _encode_steps(
    tokenizer: PreTrainedTokenizerBase,
    messages: str,
    prompt_ids: Sequence[int],
    steps: Sequence[str],
    tools: str | None,
) -> tuple[list[int], list[bool]]:
    """Token ids of a response in steps, and a mask of the tokens at which they end. Raises ExampleRefused."""
    text = "".join(steps)
    turn = {"role": "assistant", "content": text}
    ids, _ = encode_turns(tokenizer, messages, prompt_ids, [turn], tools)
    shown = response_text(tokenizer, without_end(tokenizer, ids))
    before = shown.find(text)
    if before < 0:
        raise ExampleRefused("the chat template changes the text of the response, so that its steps are not found")

    def decode(some: list[int]) -> str:
        return response_text(tokenizer, without_end(tokenizer, some))

    ends = [before + end for end in accumulate(map(len, steps[:-1]))]
    last = [count - 1 for count in token_counts(ends, shown, ids, decode)] + [len(ids) - 1]
    if len(set(last)) < len(steps):
        raise ExampleRefused("two steps end in the same token")
    return ids, [place in set(last) for place in range(len(ids))]


def assemble(picks: Picks, examples: pa.Table, config: ExampleConfig) -> tuple[ExampleBatchSummary, pa.Table]:
    """(summary, EXAMPLE_BATCH table) of the picked examples, in order. `loss_tokens` is 0 except for the best
    responses, whose likelihood the loss uses."""
    owner = examples.column("example").to_numpy()
    starts = np.searchsorted(owner, [number for _, number in picks], side="left")
    ends = np.searchsorted(owner, [number for _, number in picks], side="right")
    rows = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    chosen = examples.take(pa.array(rows, pa.int64()))
    uids = [uid for (uid, _), a, b in zip(picks, starts, ends, strict=True) for _ in range(b - a)]
    columns: dict[str, Any] = {
        "prompt_uid": pa.array(uids, pa.string()),
        "sample_index": chosen.column("member"),
        "attempt": pa.array(np.zeros(len(rows), np.int32)),
    }
    columns |= {name: chosen.column(name) for name in EXAMPLES.names if name in EXAMPLE_BATCH.names}
    batch = pa.table([columns[name] for name in EXAMPLE_BATCH.names], schema=EXAMPLE_BATCH)
    if config.mismatched:
        batch = _with_mismatched(batch, config.max_length)
    sizes = Counter(batch.column("prompt_uid").to_pylist())
    return ExampleBatchSummary(_train_rows(batch), members=tuple(sizes.values())), batch


def _with_mismatched(batch: pa.Table, max_length: int) -> pa.Table:
    """Add after every row its prompt with the previous row's response (cyclic), truncated to `max_length`: KTO,
    arXiv 2402.01306, section 4.1, paired as in TRL. The added row is not its example's best."""
    rows = batch.to_pylist()
    both = []
    for number, row in enumerate(rows):
        other, longest = rows[number - 1], max(1, max_length - len(row["prompt_ids"]))
        other = {"sample_index": 1} | {name: other[name][:longest] for name in ("response_ids", "loss_mask")}
        both += [row, row | other | {"score": row["score"] - 1.0}]
    return pa.Table.from_pylist(both, schema=EXAMPLE_BATCH)


def _train_rows(batch: pa.Table) -> tuple[TrainRow, ...]:
    prompts, responses = (ragged(batch.column(name)).lengths for name in ("prompt_ids", "response_ids"))
    lengths = (prompts + responses).tolist()
    masks = [sum(mask) for mask in batch.column("loss_mask").to_pylist()]
    uids, scores = (batch.column(name).to_pylist() for name in ("prompt_uid", "score"))
    best = dict.fromkeys(uids, -math.inf)
    for uid, score in zip(uids, scores, strict=True):
        best[uid] = max(score, best[uid])
    return tuple(
        TrainRow(tokens, loss_tokens if score == best[uid] else 0, True)
        for tokens, loss_tokens, uid, score in zip(lengths, masks, uids, scores, strict=True)
    )


def attach(batch: pa.Table, scores: Sequence[pa.Table]) -> pa.Table:
    """The batch with the reference's `token_scores`, in any order. Raises ValueError if a row has no score."""
    table = pa.concat_tables(scores)
    place = {key: row for row, key in enumerate(identities(table))}
    missing = [key for key in identities(batch) if key not in place]
    if missing:
        raise ValueError(f"example {missing[0][0]}[{missing[0][1]}] was not scored by the reference")
    order = pa.array([place[key] for key in identities(batch)], pa.int64())
    given = {name: table.column(name).take(order) for name in TEACHER_SCORES.names if name in table.column_names}
    if len(given) > 1:
        given[TEACHER_WEIGHTS.name] = pa.array([[1.0]] * batch.num_rows, TEACHER_WEIGHTS.type)
    for name, column in given.items():
        batch = batch.set_column(EXAMPLE_BATCH.get_field_index(name), EXAMPLE_BATCH.field(name), column)
    return batch


@dataclass(frozen=True)
class ExampleMicroBatch:
    """Rows of a batch as tensors; for the fields see `troupe.workers.algorithms.offline_objectives.Scored`."""

    table: TokenTable
    tokens: TokenBatch
    groups: Groups
    score: torch.Tensor
    margin: torch.Tensor
    desirable: torch.Tensor
    ref_logprobs: torch.Tensor | None
    step_labels: torch.Tensor


class ExampleTable:
    """An EXAMPLE_BATCH table, to be cut into micro-batches."""

    def __init__(self, table: pa.Table) -> None:
        self.tokens = TokenTable(table)
        self.member = torch.tensor(table.column("sample_index").to_pylist(), dtype=torch.int64)
        # Scores that differ in the data differ here too, so float64.
        self._score, self._margin = (
            torch.tensor(table.column(name).to_pylist(), dtype=torch.float64) for name in ("score", "margin")
        )
        self._desirable = torch.tensor(table.column("desirable").to_pylist(), dtype=torch.bool)
        self._step_labels: list[list[float] | None] = table.column("step_labels").to_pylist()
        uids = table.column("prompt_uid").to_pylist()
        number = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
        self._group = torch.tensor([number[uid] for uid in uids], dtype=torch.int64)

    def cut(self, rows: Sequence[int], plan: RankPlan, device: torch.device | str) -> ExampleMicroBatch:
        """The given rows of the plan: whole examples with their members in order. The filler batch without rows."""
        index = torch.tensor(rows, dtype=torch.int64)
        tokens = self.tokens.cut(rows, plan).to(device)
        labels = [label for row in rows for label in self._step_labels[row] or ()]
        group = torch.unique_consecutive(self._group[index], return_inverse=True)[1]
        return ExampleMicroBatch(
            table=self.tokens,
            tokens=tokens,
            groups=Groups(to_device(group, device), to_device(self.member[index], device)),
            score=to_device(self._score[index], device),
            margin=to_device(self._margin[index], device),
            desirable=to_device(self._desirable[index], device),
            ref_logprobs=self.tokens.floats("ref_logprobs", tokens),
            step_labels=to_device(torch.tensor(labels, dtype=torch.float64), device),
        )


def encode_candidates(
    tokenizer: PreTrainedTokenizerBase, messages: str, prompt_ids: Sequence[int], texts: Sequence[str], longest: int
) -> list[list[int]]:
    """Token ids of every text as a response to `messages`, to its turn's end. Raises PromptRefused."""
    encoded = []
    for number, text in enumerate(texts):
        try:
            ids = encode_response(tokenizer, messages, prompt_ids, text)
        except ExampleRefused as error:
            raise PromptRefused(f"candidate {number}: {error}") from error
        if len(ids) > longest:
            raise PromptRefused(f"candidate {number} has {len(ids)} tokens, more than sampling.max_tokens, {longest}")
        encoded.append(ids)
    return encoded

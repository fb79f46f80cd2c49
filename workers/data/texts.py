"""Plain texts that the policy trains on along with rewards (the pretraining mix of PPO-ptx, arXiv 2203.02155)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from troupe.workers.contract.messages import TEXTS, RankPlan, TextCut, TextSummary
from troupe.workers.data.plain_text import as_text, text_ids
from troupe.workers.data.tokenizer import before_a_text, outside_embedding
from troupe.workers.models.token_batch import TokenBatch, TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REPORTED = 20


def cut_texts(tokenizer: PreTrainedTokenizerBase, texts: pa.Table, max_tokens: int) -> tuple[TextSummary, pa.Table]:
    """(summary, TEXTS table): every text (columns `text`, `origin`) as tokens with an end-of-sequence token, in
    pieces of at most `max_tokens`, but no last one of one token. A text with a token outside the embedding is
    refused."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for text in texts.to_pylist():
        ids = [*before_a_text(tokenizer), *text_ids(tokenizer, as_text(tokenizer, text["text"])), *end]
        if why := outside_embedding(tokenizer, ids):
            problems.append(f"{text['origin']}: {why}")
            continue
        pieces = [ids[start : start + max_tokens] for start in range(0, len(ids), max_tokens)]
        rows += [
            {
                "prompt_uid": text["origin"],
                "sample_index": number,
                "attempt": 0,
                "prompt_ids": piece[:1],
                "response_ids": piece[1:],
                "loss_mask": [True] * (len(piece) - 1),
            }
            for number, piece in enumerate(pieces)
            if len(piece) > 1
        ]
    tokens = tuple(1 + len(row["response_ids"]) for row in rows)
    summary = TextSummary(tokens, len(problems), tuple(problems[:MAX_REPORTED]))
    return summary, pa.Table.from_pylist(rows, schema=TEXTS)


def cut_sources(
    tokenizer: PreTrainedTokenizerBase, texts: pa.Table, cuts: Sequence[TextCut]
) -> tuple[tuple[TextSummary, ...], pa.Table]:
    """A summary of each source, whose texts follow each other, cut as `cut_texts` does, and one TEXTS table."""
    starts = accumulate((cut.rows for cut in cuts), initial=0)
    found = [
        cut_texts(tokenizer, texts.slice(start, cut.rows), cut.max_tokens)
        for start, cut in zip(starts, cuts, strict=False)
    ]
    return tuple(summary for summary, _ in found), pa.concat_tables(table for _, table in found)


def text_batches(texts: pa.Table, plan: RankPlan) -> list[TokenBatch]:
    """The plan's pieces as micro-batches; an empty one becomes the filler batch."""
    rows = [row for part in plan.micro_batches for row in part]
    table = TokenTable(texts.take(pa.array(rows, pa.int64())))
    starts = accumulate(map(len, plan.micro_batches), initial=0)
    return [table.cut(range(start, end), plan) for start, end in pairwise(starts)]

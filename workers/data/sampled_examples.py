"""Samples of a run as examples: their tokens are not tokenized again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.contract.offline_messages import EXAMPLES, SAMPLED, ExampleSummary
from troupe.workers.data.examples import MAX_REPORTED
from troupe.workers.data.plain_text import response_text
from troupe.workers.data.tokenizer import outside_embedding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sampled_examples(
    tokenizer: PreTrainedTokenizerBase, samples: pa.Table, config: ExampleConfig
) -> tuple[ExampleSummary, pa.Table]:
    """(summary, EXAMPLES table) of an EXAMPLE_TEXTS table that has tokens; rows that do not fit are omitted and
    reported. None is usable if the tokens of a row are not its text: another tokenizer wrote them."""
    kept, problems = list[int](), list[str]()
    if len(found := {len(one) for one in samples.column("teacher_weights") if one.is_valid}) > 1:
        why = f"samples with {min(found)} and with {max(found)} teachers cannot be mixed"
        return ExampleSummary(0, 0, samples.num_rows, (why,)), EXAMPLES.empty_table()
    for row, one in enumerate(samples.select(["responses", "origin", "prompt_ids", "response_ids"]).to_pylist()):
        ids: Sequence[int] = [*one["prompt_ids"], *one["response_ids"]]
        if why := _of_another(tokenizer, one, ids):
            return ExampleSummary(0, 0, samples.num_rows, (f"{one['origin']}: {why}",)), EXAMPLES.empty_table()
        if len(ids) <= config.max_length:
            kept.append(row)
        else:
            long = f"prompt and response have {len(ids)} tokens, more than {config.max_length}"
            problems.append(f"{one['origin']}: {long}")
    chosen = samples.take(pa.array(kept, pa.int64()))
    columns: dict[str, Any] = {
        "example": pa.array(np.arange(len(kept)), pa.int64()),
        "member": pa.array(np.zeros(len(kept), np.int32)),
        "score": pa.array(np.zeros(len(kept))),
        "step_labels": pa.nulls(len(kept), EXAMPLES.field("step_labels").type),
    }
    columns |= {name: chosen.column(name) for name in (*SAMPLED.names, "margin", "desirable")}
    table = pa.table([columns[name] for name in EXAMPLES.names], schema=EXAMPLES)
    tokens = sum(len(ids) for name in ("prompt_ids", "response_ids") for ids in chosen.column(name))
    sources = Counter(name for name in chosen.column("source").to_pylist() if name is not None)
    return ExampleSummary(len(kept), tokens, len(problems), tuple(problems[:MAX_REPORTED]), dict(sources)), table


def _of_another(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], ids: Sequence[int]) -> str:
    """Why the tokens of a row are another tokenizer's, or empty if they are this one's."""
    if outside := outside_embedding(tokenizer, ids):
        return f"sampled with another vocabulary: {outside}"
    (text,) = (json.loads(turns)[-1]["content"] for turns in row["responses"])
    found = response_text(tokenizer, row["response_ids"])
    if "".join(text.split()) in "".join(found.split()):
        return ""
    return f"sampled with another tokenizer: the tokens of {text!r:.60} are {found!r:.60} here"

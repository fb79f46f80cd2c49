"""Batches of given lengths to train on, with random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from troupe.workers.contract.messages import TRAIN, TrainRow, TrainSummary

_LOGPROB = -8.0
"""Log-prob of every token, roughly what a model gives random tokens."""


@dataclass(frozen=True)
class GroupLengths:
    """Tokens of the sequences of one group."""

    prompt: int
    responses: tuple[int, ...]


def train_batch(groups: Sequence[GroupLengths], vocabulary: int, seed: int) -> tuple[TrainSummary, pa.Table]:
    """(scalars of the rows, TRAIN table) of random tokens of these lengths, with ids below `vocabulary`."""
    rng = np.random.default_rng(seed)
    samples, rows = list[dict[str, Any]](), list[TrainRow]()
    for number, group in enumerate(groups):
        prompt = rng.integers(0, vocabulary, group.prompt)
        for index, length in enumerate(group.responses):
            samples.append(train_row(number, index, prompt, rng.integers(0, vocabulary, length)))
            rows.append(TrainRow(group.prompt + length, length, True, group.prompt, number))
    return TrainSummary(tuple(rows)), pa.Table.from_pylist(samples, schema=TRAIN)


def train_row(group: int, index: int, prompt: Any, response: Any) -> dict[str, Any]:
    """A row of a TRAIN table; those with odd indices have a positive advantage, the others a negative one."""
    logprobs, zeros = [_LOGPROB] * len(response), [0.0] * len(response)
    return {
        "prompt_uid": f"group-{group}",
        "sample_index": index,
        "attempt": 0,
        "segment": 0,
        "prompt_ids": prompt,
        "response_ids": response,
        "loss_mask": [True] * len(response),
        "rollout_logprobs": logprobs,
        "ref_logprobs": logprobs,
        "values": zeros,
        "advantages": [1.0 if index % 2 else -1.0] * len(response),
        "returns": zeros,
        "reward": 0.0,
    }

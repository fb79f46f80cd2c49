"""Log-probs of a whole sequence, as engines return them of a prompt, and the scores of a response that they contain."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from troupe.workers.contract.messages import TEACHER_TOKENS
from troupe.workers.models.distillation import LEAST_LOGPROB
from troupe.workers.models.token_batch import score_table

_LEAST_REST = 2.0**-24
"""Least probability of all other tokens together: what is left of 1 by log-probs in float32 is no more exact."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Of every token of a sequence but the first: the token itself, then the k likeliest in its place."""

    ids: np.ndarray
    """int64 [n - 1, 1 + k]."""
    logprobs: np.ndarray
    """float64 [n - 1, 1 + k], at temperature 1."""


@dataclass(frozen=True)
class ResponseScores:
    """What a token_scores table has of a response of T tokens."""

    logprobs: np.ndarray
    """float64 [T], of its tokens."""
    top_ids: np.ndarray
    """int64 [T, k], the likeliest tokens."""
    top_logprobs: np.ndarray
    """float64 [T, k + 1], of these and of all other tokens together."""

    @classmethod
    def missing(cls, tokens: int, top_k: int) -> ResponseScores:
        """The scores of a response that has none: not a number."""
        nan = np.full((tokens, top_k + 1), np.nan)
        return cls(nan[:, 0], np.tile(np.arange(top_k), (tokens, 1)), nan)


_CLAMPED = -9999.0
"""vLLM's servers send it in place of minus infinity, which JSON lacks."""


def read_prompt_logprobs(body: bytes, sequence: Sequence[int], top_k: int) -> PromptLogprobs | str:
    """The log-probs in the body of a vLLM server's completion of a sequence, or why it has none. Each token's are an
    object by token id: the token itself, and the `top_k` likeliest by their rank, of which it may be one."""
    try:
        match json.loads(body):
            case {"choices": [{"prompt_logprobs": [None, *places]}]} if len(places) == len(sequence) - 1:
                return _read_places(places, sequence, top_k)
            case {"choices": [{"prompt_logprobs": [*places]}]}:
                return f"the endpoint returned log-probs of {len(places)} tokens, not of {len(sequence)}"
            case _:
                return "the endpoint returned no log-probs of the sequence (prompt_logprobs)"
    except (ValueError, RecursionError):
        return "the endpoint's answer is not JSON"


def _read_places(places: Sequence[Any], sequence: Sequence[int], top_k: int) -> PromptLogprobs | str:
    ids, logprobs = np.empty((len(places), 1 + top_k), np.int64), np.empty((len(places), 1 + top_k))
    for number, (place, token) in enumerate(zip(places, sequence[1:], strict=True)):
        try:
            found = {int(name): _logprob(entry["logprob"]) for name, entry in place.items()}
            ranked = {entry["rank"]: int(name) for name, entry in place.items()} if top_k else {}
            ids[number] = [token, *(ranked[rank] for rank in range(1, top_k + 1))]
            logprobs[number] = [found[one] for one in ids[number].tolist()]
        except (AttributeError, KeyError, TypeError, ValueError):
            wanted = f"token {token}" + (f" and the {top_k} likeliest" if top_k else "")
            return f"the endpoint returned no log-probs of {wanted} in place {number + 1}"
    return PromptLogprobs(ids, logprobs)


def _logprob(value: float | None) -> float:
    """A log-prob as JSON has it: null if it is not a number. Raises TypeError."""
    if value is None:
        return math.nan
    return -math.inf if value <= _CLAMPED else float(value)


def score_response(found: PromptLogprobs, sequence: Sequence[int], tokens: int, top_k: int) -> ResponseScores | str:
    """The scores of the last `tokens` tokens of a sequence, or why these are not theirs."""
    shape = (len(sequence) - 1, 1 + top_k)
    if found.ids.shape != shape or found.logprobs.shape != shape:
        return f"its log-probs have the shapes {found.ids.shape} and {found.logprobs.shape}, not {shape}"
    if other := np.flatnonzero(found.ids[:, 0] != sequence[1:]).tolist():
        return f"its log-probs are of token {found.ids[other[0], 0]} at {other[0] + 1}, not of {sequence[other[0] + 1]}"
    ids, logprobs = found.ids[-tokens:], found.logprobs[-tokens:]
    top = np.maximum(logprobs[:, 1:], LEAST_LOGPROB)
    rest = np.log(np.maximum(1.0 - np.exp(top).sum(1, keepdims=True), _LEAST_REST))
    return ResponseScores(logprobs[:, 0], ids[:, 1:], np.concatenate([top, rest], 1))


def response_table(column: str, rows: pa.Table, scores: Sequence[ResponseScores], top_k: int) -> pa.Table:
    """The token_scores table of these rows, with the likeliest tokens if `top_k` is above 0."""
    lengths = torch.tensor([len(one.logprobs) for one in scores], dtype=torch.int64)
    each = [ResponseScores.missing(0, top_k), *scores]
    values = torch.from_numpy(np.concatenate([one.logprobs for one in each]))
    ids = torch.from_numpy(np.concatenate([one.top_ids for one in each]))
    top = torch.from_numpy(np.concatenate([one.top_logprobs for one in each]))
    read = list(zip(TEACHER_TOKENS, (ids, top), strict=True)) if top_k else []
    return score_table(column, rows, values, lengths, read)

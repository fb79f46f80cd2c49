"""The tables and summaries of training on given examples; schemas are versioned like those of `workers.messages`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from workers.messages import IDENTITY, SCHEMA_VERSION, TrainSummary

_META: dict[bytes | str, bytes | str] = {"troupe_schema": SCHEMA_VERSION}

EXAMPLE_TEXTS = pa.schema(
    [
        pa.field("messages", pa.string(), nullable=False),  # JSON, as in PROMPTS
        pa.field("responses", pa.list_(pa.string()), nullable=False),  # best first
        pa.field("scores", pa.list_(pa.float64()), nullable=False),  # one per response, or none
        pa.field("margin", pa.float64(), nullable=False),  # of a pair; 0 where the data say nothing
        pa.field("desirable", pa.bool_(), nullable=False),  # of a labelled response; True elsewhere
        pa.field("origin", pa.string(), nullable=False),  # "file.jsonl:17", for error messages
    ],
    metadata=_META,
)
"""The pool examples are drawn from: one row per example, with all its responses."""

_TOKENS = (
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    pa.field("score", pa.float64(), nullable=False),
    pa.field("margin", pa.float64(), nullable=False),
    pa.field("desirable", pa.bool_(), nullable=False),
)

EXAMPLES = pa.schema(
    [pa.field("example", pa.int64(), nullable=False), pa.field("member", pa.int32(), nullable=False), *_TOKENS],
    metadata=_META,
)
"""Tokenised examples: one row per response, the rows of an example together and in order of `member`."""

EXAMPLE_BATCH = pa.schema([*IDENTITY, *_TOKENS, pa.field("ref_logprobs", pa.list_(pa.float32()))], metadata=_META)
"""One step's batch. `prompt_uid` names the example's visit and `sample_index` its member: 0 is the response to learn
from or the best one, those after it follow in rank; for KTO, 1 is the mismatched response."""


@dataclass(frozen=True)
class ExampleBatchSummary(TrainSummary):
    """Scalars of one batch of examples."""

    members: tuple[int, ...] = ()
    """Rows of each example; the rows of an example stand together."""


CALIBRATION_BINS = 10
_BIN = "calibration_bin_"

Tally = Mapping[str, tuple[float, float]]
"""Sums that are to become means: name -> (total, weight). They add up over micro-batches and ranks."""


@dataclass(frozen=True)
class ExampleSummary:
    """What became of a pool of texts."""

    usable: int
    """Examples in the table."""
    tokens: int
    refused: int
    problems: tuple[str, ...]
    """`file:row: reason` of the first refused ones."""


@dataclass(frozen=True)
class EvaluationPart:
    """One rank's share of an evaluation; both fields add up over ranks."""

    terms: dict[str, float]
    """The loss and its parts."""
    tally: dict[str, tuple[float, float]]


def add_tallies(parts: Iterable[Tally]) -> dict[str, tuple[float, float]]:
    """The sum of several tallies."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + value, before[1] + weight)
    return total


def calibration_bin(number: int, what: str) -> str:
    """Name of a bin's entry in a tally; `what` is `confidence` or `correct`."""
    return f"{_BIN}{number}/{what}"


def figures(tally: Tally) -> dict[str, float]:
    """The means; entries without weight are left out.

    Calibration bins become `calibration_error`, the expected calibration error: the mean over all pairs of
    |accuracy - confidence| of the pair's bin (Naeini et al. 2015; Guo et al. 2017, arXiv 1706.04599, eq. 3).
    """
    means = {name: total / weight for name, (total, weight) in tally.items() if weight and not name.startswith(_BIN)}
    gap = weights = 0.0
    for number in range(CALIBRATION_BINS):
        confidence, weight = tally.get(calibration_bin(number, "confidence"), (0.0, 0.0))
        correct, _ = tally.get(calibration_bin(number, "correct"), (0.0, 0.0))
        gap, weights = gap + abs(correct - confidence), weights + weight
    return means | ({"calibration_error": gap / weights} if weights else {})

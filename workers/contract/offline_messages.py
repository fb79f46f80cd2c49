"""Tables and summaries of offline training; schemas are versioned as in `troupe.workers.contract.messages`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from troupe.workers.contract.messages import IDENTITY, TEACHER_TOKENS, TEACHER_WEIGHTS, TrainSummary, versioned

TEACHER_SCORES = pa.schema([pa.field("ref_logprobs", pa.list_(pa.float32())), *TEACHER_TOKENS, TEACHER_WEIGHTS])
"""What samples may have of teachers, as in TRAIN."""
SAMPLED = pa.schema(
    [
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        *TEACHER_SCORES,
    ]
)
"""Tokens of samples, as the run that sampled them has them."""

EXAMPLE_TEXTS = versioned(
    pa.field("messages", pa.string(), nullable=False),  # JSON, as in PROMPTS
    pa.field("responses", pa.list_(pa.string()), nullable=False),  # best first; JSON, the turns after them
    # one per response; none: the order is strict; of a process reward model, responses are steps, scores labels
    pa.field("scores", pa.list_(pa.float64()), nullable=False),
    pa.field("margin", pa.float64(), nullable=False),  # of a pair; 0 if the data has none
    pa.field("desirable", pa.bool_(), nullable=False),  # of a labelled response; True otherwise
    pa.field("tools", pa.string()),  # JSON schemas of functions, as JSON; null: none
    pa.field("origin", pa.string(), nullable=False),  # "file.jsonl:17", for error messages
    pa.field("source", pa.string()),  # name of the source in a mixture; null: there is one source
    *SAMPLED,  # null unless the examples are samples of a run
)
"""The example pool: one row per example, with all its responses."""

_TOKENS = (
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    pa.field("score", pa.float64(), nullable=False),  # a higher one is better, an equal one tied
    pa.field("margin", pa.float64(), nullable=False),
    pa.field("desirable", pa.bool_(), nullable=False),
    pa.field("step_labels", pa.list_(pa.float64())),  # one for each token of the loss mask, at which a step ends
    *TEACHER_SCORES,
)

EXAMPLES = versioned(
    pa.field("example", pa.int64(), nullable=False), pa.field("member", pa.int32(), nullable=False), *_TOKENS
)
"""Tokenized examples: one row per response; the rows of an example are adjacent and ordered by `member`."""

EXAMPLE_BATCH = versioned(*IDENTITY, *_TOKENS)
"""Batch of one step. `prompt_uid` names the example's visit, and `sample_index` its member: 0 is the demonstration or
the best response, the others follow in rank, tied ones in any order. For KTO, 1 is the mismatched response."""


@dataclass(frozen=True)
class ExampleBatchSummary(TrainSummary):
    """Scalars of one batch of examples."""

    members: tuple[int, ...] = ()
    """Number of rows of each example; the rows of an example are adjacent."""


CALIBRATION_BINS = 10
_BIN = "calibration_bin_"

Tally = Mapping[str, tuple[float, float]]
"""Sums of weighted means: name -> (total, weight). They add up over micro-batches and ranks."""


@dataclass(frozen=True)
class ExampleSummary:
    """Result of tokenizing an example pool."""

    usable: int
    """Examples in the table."""
    tokens: int
    refused: int
    problems: tuple[str, ...]
    """`file:row: reason` of the first refused examples."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Number of consecutive examples of each source of a mixture, by the source's name."""


@dataclass(frozen=True)
class EvaluationPart:
    """Evaluation result of one rank; both fields add up over ranks."""

    terms: dict[str, float]
    """The loss and its parts."""
    tally: dict[str, tuple[float, float]]


def add_tallies(parts: Iterable[Tally]) -> dict[str, tuple[float, float]]:
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + value, before[1] + weight)
    return total


def calibration_bin(number: int, what: str) -> str:
    """Name of the tally entry of a calibration bin; `what` is `confidence` or `correct`."""
    return f"{_BIN}{number}/{what}"


def tally_means(tally: Tally) -> dict[str, float]:
    """Means of a tally, without entries of weight 0. Calibration bins become `calibration_error`: the mean over
    pairs of |accuracy - confidence| of the pair's bin (Guo et al. 2017, arXiv 1706.04599, eq. 3)."""
    means = {name: total / weight for name, (total, weight) in tally.items() if weight and not name.startswith(_BIN)}
    gap = weights = 0.0
    for number in range(CALIBRATION_BINS):
        confidence, weight = tally.get(calibration_bin(number, "confidence"), (0.0, 0.0))
        correct, _ = tally.get(calibration_bin(number, "correct"), (0.0, 0.0))
        gap, weights = gap + abs(correct - confidence), weights + weight
    return means | ({"calibration_error": gap / weights} if weights else {})

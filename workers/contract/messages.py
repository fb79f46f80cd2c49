"""The tables that move between workers, and the scalars that come back to the controller.

Tables are Arrow, one row per sample, and travel as references; every table carries the sample's identity, so
tables from different workers join by `(prompt_uid, sample_index)` in whatever order and partition they arrive.
Summaries are small frozen dataclasses: their size does not depend on sequence length.

Schemas are versioned (`SCHEMA_VERSION` in the metadata) and carry turn spans, reward spans and per-token loss
masks, so that multi-turn environments and process rewards need no new layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from workers.advantage_state import AdvantageState
from workers.tables import pickle_tables

pickle_tables()

SCHEMA_VERSION = "1"
_META: dict[bytes | str, bytes | str] = {"troupe_schema": SCHEMA_VERSION}

IDENTITY = (
    pa.field("prompt_uid", pa.string(), nullable=False),
    pa.field("sample_index", pa.int32(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
)

_SPAN = pa.struct([("name", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_VERSION_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_REWARD_SPAN = pa.struct([("end", pa.int32()), ("reward", pa.float64())])  # end: response tokens up to there
_COMPONENT = pa.struct([("name", pa.string()), ("value", pa.float64())])

PROMPTS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),  # JSON: [{"role": ..., "content": ...}, ...]
        pa.field("answer", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),  # JSON object, passed to reward functions
        pa.field("origin", pa.string(), nullable=False),  # "file.jsonl:17", for error messages
    ],
    metadata=_META,
)
"""The pool prompts are drawn from; held once in the object store, addressed by row."""

ROLLOUTS = pa.schema(
    [
        *IDENTITY,
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),  # one per response token
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),  # False: not sampled by the policy
        pa.field("weight_versions", pa.list_(_VERSION_SPAN), nullable=False),  # spans over response tokens
        pa.field("turns", pa.list_(_SPAN), nullable=False),  # spans over response tokens, by speaker
        pa.field("finish_reason", pa.string(), nullable=False),  # stop | length
        pa.field("response", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("generate_s", pa.float32(), nullable=False),  # arrival in the engine to last token
        pa.field("first_token_s", pa.float32(), nullable=False),
    ],
    metadata=_META,
)
"""What a rollout worker returns for one group."""

REWARDS = pa.schema(
    [
        *IDENTITY,
        pa.field("status", pa.string(), nullable=False),  # "ok" or why there is no reward
        pa.field("reward", pa.float64()),  # null unless status is ok
        pa.field("components", pa.list_(_COMPONENT), nullable=False),  # unweighted, by label
        pa.field("reward_spans", pa.list_(_REWARD_SPAN), nullable=False),  # process rewards; empty: outcome only
    ],
    metadata=_META,
)
"""What a reward worker returns for one group."""


def token_scores(column: Literal["ref_logprobs", "values", "old_logprobs"]) -> pa.Schema:
    """Schema of a table with one float per response token, under the name `column`."""
    return pa.schema([*IDENTITY, pa.field(column, pa.list_(pa.float32()), nullable=False)], metadata=_META)


TRAIN = pa.schema(
    [
        *IDENTITY,
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("old_logprobs", pa.list_(pa.float32())),  # null: equal to the current policy's
        pa.field("ref_logprobs", pa.list_(pa.float32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32()), nullable=False),
        pa.field("returns", pa.list_(pa.float32())),
        pa.field("reward", pa.float64(), nullable=False),
    ],
    metadata=_META,
)
"""One step's batch, as the trainers read it."""


TEXTS = pa.schema(
    [
        *IDENTITY,
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # the first token, which nothing predicts
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    ],
    metadata=_META,
)
"""Texts in pieces: `prompt_uid` is the text's origin, `sample_index` numbers its pieces."""


class WorkerGone(RuntimeError):
    """Raised by a worker that answers but can never work again: only a fresh one helps."""


@dataclass(frozen=True)
class Peak:
    """The most memory that a worker has held so far, in bytes."""

    host: int
    """Resident, each of its processes at its own peak. Pages of shared memory count once they were read."""
    gpu: int = 0
    """Allocated by torch on a GPU; 0 without one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker says along with what it was asked."""

    peak: Peak | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GroupRequest:
    """Ask a rollout worker for `samples` completions of one prompt."""

    prompt_uid: str
    row: int
    """Row of the prompt pool."""
    attempt: int
    samples: int
    seed: int
    greedy: bool = False
    top_p: float = 1.0
    temperature: float | None = None
    """None: the training temperature."""


@dataclass(frozen=True)
class SampleSummary:
    """What the controller knows of one sample."""

    sample_index: int
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    oldest_version: int
    newest_version: int


@dataclass(frozen=True)
class GroupSummary:
    """What the controller knows of one finished group."""

    prompt_uid: str
    attempt: int
    engine: str
    samples: tuple[SampleSummary, ...]
    generate_s: float
    refused: str = ""
    """Why the prompt itself cannot be used (too long, empty, ...); then there are no samples."""
    cached_tokens: int = 0
    """Prompt tokens of all samples together that the engine had in its cache, and did not compute."""
    finished_ahead: int = 0
    """Samples of the engine's other groups that are finished while their groups are not: their places are free."""


@dataclass(frozen=True)
class RewardSummary(Answer):
    """Scalars of one scored group; one entry per sample, in sample order."""

    prompt_uid: str
    attempt: int
    statuses: tuple[str, ...]
    rewards: tuple[float | None, ...]
    components: dict[str, tuple[float | None, ...]]
    steps_differ: bool = False
    """Whether the group's process rewards differ from each other; False where there are none."""


@dataclass(frozen=True)
class ScoreSummary(Answer):
    """What a worker of the reference says of what it scored."""

    rows: int


@dataclass(frozen=True)
class PrepareRequest:
    """What the controller knows of a batch that is to be prepared."""

    keep: tuple[tuple[str, int], ...]
    """(prompt_uid, sample_index) of the rows of the result, in that order; samples of one prompt_uid form a group."""
    state: AdvantageState = field(default_factory=AdvantageState)
    """What advantages remember of earlier batches."""
    prompt_rows: Mapping[str, int] = field(default_factory=dict)
    """Row of the prompt pool of each prompt_uid (smooth_group)."""
    greedy_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of the greedy response of each prompt_uid (greedy baseline)."""


@dataclass(frozen=True)
class TrainRow:
    """What the controller knows of one row of a TRAIN table; enough to plan micro-batches."""

    tokens: int
    """Prompt plus response."""
    loss_tokens: int
    has_signal: bool
    """False: its advantages are all zero, so the policy-gradient term is zero."""
    prompt_tokens: int = 0
    group: int = 0
    """Rows of one group have the same prompt."""


@dataclass(frozen=True)
class TrainSummary:
    """Scalars of one prepared batch."""

    rows: tuple[TrainRow, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    state: AdvantageState = field(default_factory=AdvantageState)
    """What advantages remember after this batch."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in one optimizer update: its micro-batches, as row numbers.

    Every rank has the same number of micro-batches; an empty one is a forward and backward pass of weight zero,
    so that collectives stay in step.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    total_loss_tokens: int
    """Over all ranks, the rows without signal included: the loss does not depend on the split."""
    total_sequences: int
    shared: bool = False
    """Rows of a micro-batch that stand together and have one prompt are laid out behind one copy of it."""
    texts: RankPlan | None = None
    """Policy: pieces of text that are learnt in the same update (PPO-ptx), as rows of the TEXTS table."""


@dataclass(frozen=True)
class TextSummary:
    """What the controller knows of a TEXTS table."""

    tokens: tuple[int, ...]
    """Tokens of every piece."""


@dataclass(frozen=True)
class UpdateMetrics(Answer):
    """One rank's share of one update. `sums` add up over ranks to the batch's figure; `values` are equal on all."""

    sums: dict[str, float]
    values: dict[str, float]
    skipped: bool = False
    """The gradient was not finite; no parameter changed."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor in a weight file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WeightUpdate:
    """A published version of the policy's weights."""

    version: int
    digest: str
    """xxh3-128 of the digests of the payload's pieces followed by the names, types and shapes."""
    path: str
    """Shared-memory file on the publisher's node (shm back-end)."""
    host: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int


@dataclass(frozen=True)
class WeightAck(Answer):
    """An engine's word on what it now serves."""

    engine: str
    version: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class WorkerHealth(Answer):
    """A worker's sign of life."""

    name: str
    host: str
    pid: int
    version: int
    in_flight: int

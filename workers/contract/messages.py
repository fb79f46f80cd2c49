"""The tables that move between workers, and the scalars that return to the controller.

Tables are Arrow tables with one row per sample, passed by reference. Every table has the sample's identity, so that
tables from different workers join by `(prompt_uid, sample_index)` in any order and partition. Summaries are small
frozen dataclasses; their size does not depend on sequence length.

Schemas are versioned (`SCHEMA_VERSION` in the metadata). They have turn spans, reward spans and per-token loss masks,
so that multi-turn environments and process rewards need no new layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.environments import OK

SCHEMA_VERSION = "2"
SCHEMA_METADATA: dict[bytes | str, bytes | str] = {"troupe_schema": SCHEMA_VERSION}


def versioned(*fields: pa.Field) -> pa.Schema:
    """A schema of these fields with its version in the metadata."""
    return pa.schema(fields, metadata=SCHEMA_METADATA)


IDENTITY = (
    pa.field("prompt_uid", pa.string(), nullable=False),
    pa.field("sample_index", pa.int32(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
)
SEGMENT = pa.field("segment", pa.int32(), nullable=False)
"""Number of a row among the rows of its sample. An episode has several if the chat template rewrote its history:
then each row is exactly what the engine saw."""

KEPT_TOKENS = pa.field("kept_tokens", pa.list_(pa.large_binary()))
"""For each response token the tokens that the sampler left to it; its log-prob is among these
(`contract/kept_tokens.py`); null: all tokens of the row were sampled from the whole vocabulary, or by another
policy."""

SAMPLER_TOKENS = pa.field("sampler_tokens", pa.list_(pa.large_binary()))
"""For each response token the k likeliest tokens that the engine could have sampled in its place: k ids as int32, then
their k log-probs as float32, none for a token that it did not sample; null: not recorded."""

ROUTES = pa.field("routes", pa.large_binary())
"""The experts that the engine chose for each token of the prompt and the response but the last ones, which it did not
run (`contract/routes.py`); null: they are not recorded."""

TEACHER_TOKENS = (
    pa.field("teacher_ids", pa.list_(pa.int32())),  # the k likeliest tokens at each response token, one after another
    pa.field("teacher_logprobs", pa.list_(pa.float32())),  # k + 1: of these, and of all other tokens together
)
"""A teacher's distribution, beside its log-probs; null unless the loss compares with it. In TRAIN, the `n` teachers of
a token follow each other."""
SQUARE_SUMS = pa.field("square_sums", pa.list_(pa.float32()))
"""Sum of the policy's squared probabilities of all tokens, beside `old_logprobs` if the baseline reads it."""
TEACHER_WEIGHTS = pa.field("teacher_weights", pa.list_(pa.float32()))
"""The weights of the loss of each of these teachers, for the row."""
TEACHER = "teacher."
"""Start of the name of a teacher: of its role, and of the column of its log-probs."""

IDENTITY_NAMES = tuple(field.name for field in IDENTITY)

SampleKey = tuple[str, int]
"""(prompt_uid, sample_index)"""
Unscored = Mapping[SampleKey, str]
"""Statuses of samples that lost their reward because a model has no finite score of them."""
Identity = tuple[str, int, int]
"""(prompt_uid, sample_index, attempt)"""

_SPAN = pa.struct([("name", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_VERSION_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_REWARD_SPAN = pa.struct([("end", pa.int32()), ("reward", pa.float64())])  # end: in the sample's response tokens
TURN_REWARD = pa.struct([*_REWARD_SPAN, pa.field("feedback", pa.string())])
"""A reward that the environment gives for a turn, and what it says of it; empty or null: nothing."""
_COMPONENT = pa.struct(
    [("name", pa.string()), ("value", pa.float64()), ("weight", pa.float64()), ("normalize", pa.bool_())]
)

PROMPTS = versioned(
    pa.field("row", pa.int64(), nullable=False),
    pa.field("messages", pa.string(), nullable=False),  # JSON: [{"role": ..., "content": ...}, ...]
    pa.field("answer", pa.string(), nullable=False),
    pa.field("metadata", pa.string(), nullable=False),  # JSON object, passed to reward functions
    pa.field("origin", pa.string(), nullable=False),  # "file.jsonl:17", for error messages
    pa.field("candidates", pa.list_(pa.string())),  # answers from other sources; null: none
    pa.field("source", pa.string()),  # name of the source in a mixture; null: there is one source
)
"""The prompt pool: stored once in the object store, addressed by row."""

ROLLOUTS = versioned(
    *IDENTITY,
    SEGMENT,
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),  # everything after the prompt, observations too
    pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),  # 0: not sampled; NaN: candidates
    KEPT_TOKENS,
    SAMPLER_TOKENS,
    ROUTES,
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),  # False: not sampled by the policy
    pa.field("weight_versions", pa.list_(_VERSION_SPAN), nullable=False),  # over response tokens; candidates: none
    pa.field("turns", pa.list_(_SPAN), nullable=False),  # spans over response tokens, by speaker
    pa.field("finish_reason", pa.string(), nullable=False),  # stop | length | one of BUDGETS
    pa.field("episode_status", pa.string(), nullable=False),  # "ok" or why the episode has failed
    pa.field("response", pa.string(), nullable=False),  # text of the last turn
    pa.field("messages", pa.string(), nullable=False),  # JSON: the prompt
    pa.field("conversation", pa.string(), nullable=False),  # JSON: all messages of an episode, or ""
    pa.field("turn_rewards", pa.list_(TURN_REWARD), nullable=False),  # from the environment, in the last segment
    pa.field("answer", pa.string(), nullable=False),
    pa.field("metadata", pa.string(), nullable=False),
    pa.field("engine", pa.string(), nullable=False),
    pa.field("generate_s", pa.float32(), nullable=False),  # arrival in the engine to last token
    pa.field("first_token_s", pa.float32(), nullable=False),
    pa.field("source", pa.string()),  # as in PROMPTS
    pa.field("player", pa.string()),  # of a game; null: the environment names none
)
"""Samples of one group, from a rollout worker; candidates follow as further samples."""

REWARDS = versioned(
    *IDENTITY,
    pa.field("status", pa.string(), nullable=False),  # "ok" or why there is no reward
    pa.field("reward", pa.float64()),  # null unless status is ok
    pa.field("components", pa.list_(_COMPONENT), nullable=False),  # by label
    pa.field("reward_spans", pa.list_(_REWARD_SPAN), nullable=False),  # process rewards; empty if outcome only
    pa.field("feedback", pa.string()),  # what is said of the sample, each component's on a line; null: nothing
)
"""Rewards of one group, from a reward worker."""

REFERENCES = versioned(
    pa.field("messages", pa.string(), nullable=False),  # as in PROMPTS
    pa.field("response", pa.string(), nullable=False),  # text of the reference answer
    pa.field("origin", pa.string(), nullable=False),  # as in PROMPTS
)
"""Reference answers, whose mean score is the offset of a reward model."""


def token_scores(column: str, *added: pa.Field) -> pa.Schema:
    """Schema of a table with one float per response token, under the name `column`, and the columns `added`."""
    scores = pa.field(column, pa.list_(pa.float32()), nullable=False)
    return versioned(*IDENTITY, SEGMENT, scores, *added)


TRAIN = versioned(
    *IDENTITY,
    SEGMENT,
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
    KEPT_TOKENS,
    SAMPLER_TOKENS,
    ROUTES,
    pa.field("old_logprobs", pa.list_(pa.float32())),  # null: equal to the current policy's
    pa.field("ref_logprobs", pa.list_(pa.float32())),
    *TEACHER_TOKENS,
    TEACHER_WEIGHTS,
    pa.field("values", pa.list_(pa.float32())),
    pa.field("advantages", pa.list_(pa.float32()), nullable=False),
    pa.field("returns", pa.list_(pa.float32())),
    pa.field("penalties", pa.list_(pa.float32())),  # coefficients of |log pi - log pi_old| (kl_cov); null: none
    pa.field("reward", pa.float64(), nullable=False),
    pa.field("loss_of", pa.string()),  # the source whose loss the row has; null: the run's
)
"""Batch of one step, for the trainers."""


TOKEN_RECORDS = versioned(
    *IDENTITY,
    SEGMENT,
    pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    pa.field("entropy", pa.list_(pa.float32()), nullable=False),
)
"""What the policy computed in its updates for every response token: a row for each row of each update."""

TEXTS = versioned(
    *IDENTITY,
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # the first token, which has no prediction
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
)
"""Texts cut into pieces: `prompt_uid` is the origin of the text, `sample_index` the number of the piece."""


SCORES = ("old_logprobs", "ref_logprobs", "values")
"""Columns of the token-score tables, besides the teachers'."""


def kind_of(table: pa.Table) -> str:
    """`rollouts`, `rewards`, or the column of a token-score table. Raises ValueError for another table."""
    names = set(table.column_names)
    if "response_ids" in names:
        return "rollouts"
    if {"status", "reward"} <= names:
        return "rewards"
    scores = [name for name in names if name in SCORES or name.startswith(TEACHER)]
    if len(scores) != 1:
        raise ValueError(
            f"a table with columns {sorted(names)} is neither a rollouts, a rewards nor a token_scores table"
        )
    return scores[0]


def identities(table: pa.Table) -> list[Identity]:
    return list(zip(*(table.column(name).to_pylist() for name in IDENTITY_NAMES), strict=True))


class ReferenceGone(RuntimeError):
    """No engine of the reference runs at the moment, and one can start again: ask later."""


@dataclass(frozen=True)
class ReferenceResponse:
    """A response that the reference has sampled."""

    engine: str
    """Name of the worker."""
    ids: tuple[int, ...]
    finish_reason: str
    generate_s: float
    first_token_s: float


class WeightsDamaged(RuntimeError):
    """The weights that arrived are not the ones that were published; published again, they may arrive."""


class WorkerGone(RuntimeError):
    """Raised by a worker that still answers but cannot work again and must be replaced."""

    @property
    def fault(self) -> str:
        """What ended it: the same text for the same cause; empty if unknown."""
        return ""


@dataclass(frozen=True)
class Peak:
    """Peak memory of a worker so far, in bytes."""

    host: int
    """Resident memory: the sum of the peaks of its processes. Pages of shared memory count from their first read."""
    gpu: int = 0
    """Memory allocated by torch on a GPU; 0 without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Base of the results that also report the worker's memory."""

    peak: Peak | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GroupRequest:
    """Request for `samples` completions of one prompt."""

    prompt_uid: str
    row: int
    """Row of the prompt pool."""
    attempt: int
    samples: int
    seed: int
    greedy: bool = False
    top_p: float = 1.0
    """Only with a separate temperature."""
    top_k: int = 0
    """Only with a separate temperature; 0: all tokens."""
    min_p: float = 0.0
    """Only with a separate temperature."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response; of an episode, a turn, besides the environment's. If None, as in training."""
    temperature: float | None = None
    """If None, sampled as in training, with the temperature, top-p, top-k and min-p of `sampling`."""
    candidates: bool = False
    """Whether the prompt's answers from other sources are added to the samples."""
    max_tokens: int | None = None
    """Longest response, in tokens; of an episode, longest turn if it is shorter than in training. If None, as in
    training."""
    forms: bool = True
    """Whether responses and turns have the forms that spec and environment ask for; an audit samples without any."""
    environment: str | None = None
    """Name of the environment that a sample is an episode in, empty for one without a name, or None if a sample is one
    response to its prompt."""
    finished: tuple[SampleSummary, ...] = ()
    """Samples that are not sampled again: an earlier run has finished them (`RolloutEngine.generate`)."""

    @property
    def missing(self) -> list[int]:
        """Indices of the samples to generate."""
        finished = {sample.sample_index for sample in self.finished}
        return [index for index in range(self.samples) if index not in finished]


@dataclass(frozen=True)
class EpisodeSummary:
    """Scalars of one episode."""

    turns: int
    sampled_tokens: int
    engine_prompt_tokens: int
    """Tokens of the prompts of all turns: what an engine without a prefix cache computes before it samples."""
    cached_tokens: int
    """The part of `engine_prompt_tokens` that the engine read from its cache."""
    environment_s: float
    """Time spent waiting for the environment."""
    cut_observations: int = 0
    """Messages that were longer than the bound."""
    compactions: int = 0
    """How often a conversation was compacted."""
    restarts: int = 0
    """How often the episode started again because its environment worker died."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers from the environment; the last value of each."""
    outcome: float | None = None
    """In a game of several players 1 if the player has won, 0.5 in a draw and 0 if another one has won, or None."""


@dataclass(frozen=True)
class SampleSummary:
    """Scalars of one sample."""

    sample_index: int
    prompt_tokens: int
    response_tokens: int
    """Everything after the prompt; in an episode also what the environment added."""
    finish_reason: str
    oldest_version: int
    newest_version: int
    status: str = OK
    """`ok`, or why the sample failed before it was scored."""
    segments: tuple[int, ...] = ()
    """Tokens of each row of the sample, prompt included; empty if it has one row."""
    episode: EpisodeSummary | None = None
    """None if the sample is one response to its prompt."""
    player: str = ""
    """In a game of several players, the one whose part of the episode the sample is; else empty."""

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens of each row of the sample, prompt included."""
        return self.segments or (self.prompt_tokens + self.response_tokens,)


def sampled_tokens(samples: Iterable[SampleSummary]) -> list[int]:
    """Tokens that the policy sampled, by sample: one call for a group or a batch."""
    return [one.response_tokens if one.episode is None else one.episode.sampled_tokens for one in samples]


def engine_prompt_tokens(samples: Iterable[SampleSummary]) -> list[int]:
    """Tokens of the prompts that the engine got, by sample: of every turn of an episode."""
    return [one.prompt_tokens if one.episode is None else one.episode.engine_prompt_tokens for one in samples]


@dataclass(frozen=True)
class FinishedSamples:
    """Samples of a running group that are finished while others of the group still run.

    Of an episode that is not finished, the ROLLOUTS table beside it has a row for each sampled turn: `segment` is its
    place among them, the prompt is left out, and `response` is the digest of its request (`RecordedTurns`).
    """

    prompt_uid: str
    attempt: int
    samples: tuple[SampleSummary, ...]
    turns: int = 0
    """Sampled turns of episodes that are not finished."""


@dataclass(frozen=True)
class KeepRequest:
    """Request to write groups that a later run takes over (`troupe.workers.data.kept_tables`)."""

    part: int
    """Number of the files that this request writes."""
    groups: tuple[tuple[str, int], ...]
    """(prompt_uid, attempt) of the groups, the most valuable first."""
    max_bytes: int
    """Most bytes to write; groups that do not fit are left out."""


@dataclass(frozen=True)
class KeptTable:
    """Where the rows of one group are."""

    kind: str
    """See `kind_of`."""
    file: str
    """Name of a Parquet file in the folder of the kept groups."""
    row_group: int


@dataclass(frozen=True)
class GroupSummary:
    """Scalars of one finished group."""

    prompt_uid: str
    attempt: int
    engine: str
    samples: tuple[SampleSummary, ...]
    generate_s: float
    refused: str = ""
    """Why the prompt cannot be used (too long, empty, ...); then there are no samples. Empty if it can be used."""
    cached_tokens: int = 0
    """Prompt tokens, over all samples, that the engine read from its cache instead of computing them."""
    finished_ahead: int = 0
    """Finished samples of the engine's other, unfinished groups: their slots are free."""
    candidates: tuple[SampleSummary, ...] = ()
    """Answers from other sources; their indices follow the samples'."""


@dataclass(frozen=True)
class Fault:
    """Samples of one group that a reward component failed on for the same cause."""

    cause: str
    """Component and kind of failure; for an exception of the user's function, also file and line."""
    example: str
    """Status of one of the samples."""
    samples: int


SHARED_CALL_S = 0.02
"""A reward worker begins to score another group of the same call until so much time has passed."""


@dataclass(frozen=True)
class RewardRequest:
    """How a reward worker scores a group."""

    rewards: str = ""
    """Name of a set of reward functions in `ScoringConfig.sets`, or empty for the role's."""
    vote: bool = False
    """Whether the summary includes which samples give the same answer."""
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Measured offsets of reward models, by the model's name."""


@dataclass(frozen=True)
class RewardSummary:
    """Scalars of one scored group: one entry per sample, in sample order."""

    prompt_uid: str
    attempt: int
    statuses: tuple[str, ...]
    rewards: tuple[float | None, ...]
    components: dict[str, tuple[float | None, ...]]
    answers: tuple[int | None, ...] = ()
    """Number of the answer of each sample, if a vote was requested: the same number, the same answer; `NO_ANSWER` if it
    states none, or None if that could not be found out. Empty if no vote was requested."""
    steps_differ: bool = False
    """Whether the process rewards of the group differ from each other; False if there are none."""
    faults: tuple[Fault, ...] = ()
    """Why samples have no reward."""
    seconds: float = 0.0
    """Time that the worker spent on the group."""

    def without(self, failed: Mapping[int, str]) -> RewardSummary:
        """The summary without the rewards of the samples with these indices, which have these statuses instead."""
        statuses = tuple(failed.get(i, status) for i, status in enumerate(self.statuses))
        rewards = tuple(None if i in failed else reward for i, reward in enumerate(self.rewards))
        return replace(self, statuses=statuses, rewards=rewards)

    def part(self, start: int, end: int | None = None) -> RewardSummary:
        """The entries of the samples `start` to `end`, exclusive (to the last if None)."""
        chosen = slice(start, end)
        components = {name: values[chosen] for name, values in self.components.items()}
        return replace(self, statuses=self.statuses[chosen], rewards=self.rewards[chosen], components=components)


@dataclass(frozen=True)
class ScoredGroups(Answer):
    """The rewards of groups that were scored in one call."""

    groups: tuple[RewardSummary, ...]

    @property
    def prompt_uid(self) -> str:
        """The prompts of the groups."""
        return " ".join([group.prompt_uid for group in self.groups])


@dataclass(frozen=True)
class ReferenceScores(Answer):
    """Scores of reference answers by a reward model, in the order of the table."""

    scores: tuple[float, ...]
    problem: str = ""
    """The first answer without a score, and the reason; empty if each has one."""


@dataclass(frozen=True)
class ScoreSummary(Answer):
    """Scalars of the rows whose tokens a worker scored."""

    rows: int
    failed: Mapping[SampleKey, str] = field(default_factory=dict)
    """Why samples have no finite score, by (prompt_uid, sample_index)."""
    untaught: tuple[SampleKey, ...] = ()
    """Samples without feedback and demonstration that the teacher reads: it has no scores of them."""


@dataclass(frozen=True)
class PrepareRequest:
    """Request to prepare a batch."""

    keep: tuple[SampleKey, ...]
    """(prompt_uid, sample_index) of the rows of the result, in order, and of `masked` between them; samples of one
    prompt_uid form a group."""
    state: AdvantageState = field(default_factory=AdvantageState)
    """State of the advantage estimators before this batch."""
    prompt_rows: Mapping[str, int] = field(default_factory=dict)
    """Row of the prompt pool of each prompt_uid (smooth_group)."""
    greedy_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of the greedy response of each prompt_uid (greedy baseline)."""
    masked: tuple[SampleKey, ...] = ()
    """Samples of `keep` without loss: their rewards are part of their group's statistics, but they get no row."""
    candidates: tuple[SampleKey, ...] = ()
    """Samples of `keep` that come from other sources than the policy (best_of_group, reference_pair)."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of the data of each prompt_uid, within which batch-wide statistics are computed; if empty, they are
    computed over the whole batch."""
    teachers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Weights of the teachers of each prompt_uid by name, none of one without a teacher; if empty, the reference is the
    teacher."""
    untaught: Mapping[str, frozenset[SampleKey]] = field(default_factory=dict)
    """Samples that a teacher which reads feedback or demonstrations does not teach, by its name."""
    algorithms: Mapping[str, str] = field(default_factory=dict)
    """Source of each prompt_uid whose source has settings of the algorithm."""
    compared: Mapping[str, int] = field(default_factory=dict)
    """Samples of each prompt_uid, failed ones included, each of which is compared with a response of the reference
    (reference_pair)."""

    def teachers_of(self, key: SampleKey) -> Mapping[str, float]:
        """Weights of the teachers of a sample, by name."""
        own = self.teachers.get(key[0], {})
        return {name: weight for name, weight in own.items() if key not in self.untaught.get(name, ())}


@dataclass(frozen=True)
class TrainRow:
    """Scalars of one row of a TRAIN table, for planning micro-batches."""

    tokens: int
    """Prompt plus response."""
    loss_tokens: int
    has_signal: bool
    """False if all advantages are zero, and so is the policy-gradient term."""
    prompt_tokens: int = 0
    group: int = 0
    """Number of the row's group; rows of one group have the same prompt."""
    sample: int | None = None
    """Number of the row's sample, or None if the row is a separate sample."""


@dataclass(frozen=True)
class TrainSummary:
    """Scalars of one prepared batch."""

    rows: tuple[TrainRow, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    state: AdvantageState = field(default_factory=AdvantageState)
    """State of the advantage estimators after this batch."""


@dataclass(frozen=True)
class RankPlan:
    """Work of one rank in one optimizer update: its micro-batches, as row numbers. Every rank has as many; an empty
    one is a pass of weight zero, so that all ranks run the same collectives."""

    micro_batches: tuple[tuple[int, ...], ...]
    total_loss_tokens: int
    """Over all ranks, zero-advantage rows included: the loss does not depend on the split."""
    total_sequences: int
    """Samples (of offline data: examples) over all ranks, however many rows they have."""
    packed: bool = False
    """Concatenate the rows of a micro-batch into one row of the model, without padding."""
    shared: bool = False
    """Packed: place adjacent rows of a micro-batch that have the same prompt behind one copy of it."""
    trace: str = ""
    """File that the rank writes a profile of the update to, unless empty."""
    texts: RankPlan | None = None
    """Policy: pieces of text trained on in the same update (PPO-ptx), as rows of the TEXTS table."""
    total_observation_tokens: int = 0
    """Response tokens over all ranks that the policy did not sample."""


KEPT_BATCH, KEPT_TEXTS = "batch.arrow", "texts.arrow"
"""Files of a step that is kept for a replay."""


@dataclass(frozen=True)
class KeptFile:
    """A file of a step that is kept for a replay."""

    nbytes: int
    digest: str
    """xxh3-128 of its bytes."""


@dataclass(frozen=True)
class TextCut:
    """How the next texts of a table are cut."""

    rows: int
    """Number of texts."""
    max_tokens: int
    """Longest piece, in tokens."""


@dataclass(frozen=True)
class TextSummary:
    """Scalars of a TEXTS table."""

    tokens: tuple[int, ...]
    """Number of tokens of each piece."""
    refused: int = 0
    """Texts that the model cannot read."""
    problems: tuple[str, ...] = ()
    """Why, each with its origin; the first ones."""


@dataclass(frozen=True)
class UpdateMetrics(Answer):
    """Metrics of one update from one rank: `sums` add up over ranks, `values` are equal on all ranks."""

    sums: dict[str, float]
    values: dict[str, float]
    skipped: bool = False
    """Whether the gradient was not finite, so that no parameter changed."""


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
    """xxh3-128 of the digests of the payload's pieces, followed by names, types and shapes."""
    path: str
    """Shared-memory file on the publisher's node (shm backend)."""
    host: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int


@dataclass(frozen=True)
class WeightAck(Answer):
    """Acknowledgement of an engine: the version it now serves."""

    engine: str
    version: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class WeightsSent:
    """A version of the policy's weights that was sent from device to device."""

    version: int
    digest: str
    """Digest of names, types, shapes and the sender's checksums."""
    nbytes: int
    acks: tuple[WeightAck, ...]
    """The acknowledgement of every engine."""


@dataclass(frozen=True)
class SaveStatus:
    """State of what a rank writes in the background."""

    done: bool
    failed: str = ""
    """Why its state is not written."""
    export_failed: str = ""
    """Why the model is not written, although its state is."""


@dataclass(frozen=True)
class WorkerHealth(Answer):
    """Health of a worker."""

    name: str
    host: str
    pid: int
    version: int
    in_flight: int
    gpu_memory: int = 0
    """Memory of its GPU in bytes; 0: the worker has none, or does not say."""
    gpu_ids: str = ""
    """Its GPU as CUDA_VISIBLE_DEVICES names it; empty if it has none or has not said."""
    network: str = ""
    """How fast the network between the nodes of its group is; empty if they are on one, or it has no group."""

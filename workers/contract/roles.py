"""What each role can be asked to do: the methods that the orchestrator calls on workers, as protocols.

The orchestrator names a method by its protocol (`Policy.update`), never by a string, so that the type checker compares
each call with the signature here and each worker class with the protocol of its role. The worker classes are in
`workers/{rollout,policy,critic,reference,reward,offline}.py`.

A method may be synchronous or a coroutine (`Reply`). Tables travel through the object store: the orchestrator passes
and receives references (`TableRef`), and a worker sees the tables themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.environments import EpisodeReply, Message, Row
from troupe.workers.contract.judges import Judge, JudgeAnswer, JudgeLink, Question
from troupe.workers.contract.messages import (
    FinishedSamples,
    GroupRequest,
    GroupSummary,
    KeepRequest,
    KeptFile,
    KeptTable,
    PrepareRequest,
    RankPlan,
    ReferenceResponse,
    ReferenceScores,
    RewardRequest,
    SaveStatus,
    ScoredGroups,
    ScoreSummary,
    TextCut,
    TextSummary,
    TrainSummary,
    Unscored,
    UpdateMetrics,
    WeightAck,
    WeightsSent,
    WeightUpdate,
    WorkerHealth,
)
from troupe.workers.contract.offline_messages import EvaluationPart, ExampleBatchSummary, ExampleSummary

T = TypeVar("T")

Reply = T | Awaitable[T]
"""What a method returns: a value, or a coroutine that returns one."""

TableRef = Any
"""An Arrow table for the worker, a reference to it in the object store for the orchestrator."""


class Worker(Protocol):
    """Any worker."""

    def health(self) -> Reply[WorkerHealth]:
        """Answers as long as the worker can serve."""
        ...

    def close(self) -> Reply[None]:
        """Frees what the worker holds; its process can end afterwards."""
        ...


class Replica(Worker, Protocol):
    """A worker that serves independently of the other workers of its role."""

    def start(self) -> Reply[WorkerHealth]:
        """Loads what the worker serves with."""
        ...


class EngineLink(Protocol):
    """Drives all engines at once from inside the trainer. Calls raise if an engine fails or does not answer in time."""

    @property
    def processes(self) -> int:
        """Number of engine processes in the transfer group."""
        ...

    def join(self, info: dict[str, Any]) -> None:
        """Adds every engine to the transfer group; `first_rank` is the rank of the first engine's first process."""
        ...

    def start(self) -> None:
        """Pauses every engine for an update."""
        ...

    def receive(self, info: dict[str, Any]) -> None: ...

    def finish(self, version: int, digest: str) -> Sequence[WeightAck]:
        """Serves the weights received on every engine as `version`, if they have this digest."""
        ...


class EnvironmentLink(Protocol):
    """Reaches the environment workers from a rollout worker. Replaced whenever workers join or leave."""

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        """Starts an episode on the worker with the fewest; returns the worker's name and the first observation. Raises
        EnvironmentGone if the worker died, or none is running."""
        ...

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        """The environment's answer to a turn. Raises EnvironmentGone."""
        ...

    def end(self, worker: str, episode: str) -> None:
        """Closes an episode that the environment has not ended; waits for nothing."""
        ...


class Watched(Replica, Protocol):
    """A worker that other workers call, and that the controller watches."""

    def watch(self, seconds: float) -> Reply[bool]:
        """Whether the worker still serves; answers as soon as it does not, else after `seconds`."""
        ...


class JudgeEngine(Watched, Protocol):
    """A judge worker: one vLLM engine with a frozen model."""

    def answer(self, questions: Sequence[Question]) -> Reply[list[JudgeAnswer]]:
        """Answers questions, each a conversation."""
        ...


class GuestEngine(Replica, Protocol):
    """An engine that may be on the policy's GPU."""

    def sleep(self) -> Reply[None]:
        """Releases the memory that the trainer on the engine's GPU needs, until `wake` or new weights."""
        ...

    def wake(self) -> Reply[None]:
        """Takes that memory back without new weights, if the engine has kept its own."""
        ...


class ReferenceSampler(Watched, GuestEngine, Protocol):
    """An engine of the reference."""

    def complete(
        self, request: GroupRequest, prompt_ids: list[int], indices: Sequence[int]
    ) -> Reply[list[ReferenceResponse]]:
        """Responses to a tokenized prompt with the seeds of the samples `indices` of the request."""
        ...


class ReferenceLink(Protocol):
    """The engines of the reference, for the rollout engines."""

    async def complete(
        self, request: GroupRequest, prompt_ids: list[int], indices: Sequence[int]
    ) -> list[ReferenceResponse]:
        """As `ReferenceSampler.complete`, on the least-loaded engine; a lost one's requests go to others. Raises
        ReferenceGone; RuntimeError if no engine will serve again, or one did not answer in time."""
        ...


class EnvironmentServer(Watched, Protocol):
    """An environment worker: episodes of one environment."""

    def begin(self, episode: str, row: Row) -> Reply[EpisodeReply]:
        """Starts an episode; the first observation."""
        ...

    def step(self, episode: str, message: Message) -> Reply[EpisodeReply]:
        """The environment's answer to a turn of the policy."""
        ...

    def end(self, episode: str) -> Reply[None]: ...

    def end_all(self, caller: str) -> Reply[int]:
        """Closes all episodes of a caller that is gone, also the ones waiting for a process; returns how many."""
        ...


class RolloutEngine(GuestEngine, Protocol):
    """A rollout worker: one vLLM engine."""

    def connect_environments(self, name: str, link: EnvironmentLink) -> Reply[None]:
        """Uses these environment workers for new episodes in the environment of this name."""
        ...

    def connect_judge(self, judge: JudgeLink) -> Reply[None]:
        """Lets this judge play as the players of games that the policy does not play."""
        ...

    def connect_reference(self, link: ReferenceLink) -> Reply[None]:
        """Compares samples with responses of these engines."""
        ...

    def generate(
        self, request: GroupRequest, prompts: TableRef, finished: TableRef | None = None
    ) -> Reply[tuple[GroupSummary, TableRef]]:
        """Samples one group, or the rest of it: `finished` has the rows of `request.finished` and of the turns of
        unfinished episodes. Returns its summary and a ROLLOUTS table."""
        ...

    def finished_samples(self) -> Reply[tuple[tuple[FinishedSamples, ...], TableRef]]:
        """The finished samples and turns of the groups that run, and a ROLLOUTS table with their rows."""
        ...

    def update_weights(self, update: WeightUpdate) -> Reply[WeightAck]:
        """Loads a published version of the weights after verifying its digest."""
        ...

    def write_weights(self, update: WeightUpdate, payload: TableRef) -> Reply[None]:
        """Writes the bytes of a published version to the shared memory of this node."""
        ...

    def change_weights(self, update: WeightUpdate, delta: TableRef) -> Reply[bool]:
        """Turns the version that this worker wrote before into `update`; False if it lacks the delta's base."""
        ...

    def reset_prefix_cache(self) -> Reply[bool]:
        """Forgets the states of earlier prompts."""
        ...

    def transfer_init(self, init_info: dict[str, Any]) -> Reply[None]:
        """Joins a transfer group (device back-ends)."""
        ...

    def transfer_start(self) -> Reply[None]:
        """Pauses generation for a transfer."""
        ...

    def transfer_receive(self, update_info: dict[str, Any]) -> Reply[None]: ...

    def transfer_finish(self, version: int, digest: str) -> Reply[WeightAck]:
        """Serves the weights received as `version`, if they have this digest."""
        ...


class Reward(Replica, Protocol):
    """A reward worker: reward functions, a reward model or both."""

    def connect_judge(self, judge: Judge) -> Reply[None]:
        """Asks this judge from now on."""
        ...

    def score_groups(
        self, asked: Sequence[RewardRequest], *rollouts: TableRef
    ) -> Reply[tuple[ScoredGroups, *tuple[TableRef, ...]]]:
        """Scores the first group, and begins others until `SHARED_CALL_S` have passed. Returns the rewards of those
        that it has scored, and for each of `rollouts` its REWARDS table, or None if it is not scored."""
        ...

    def score_references(self, model: str, references: TableRef) -> Reply[ReferenceScores]:
        """Scores reference answers (REFERENCES) with the reward model of this name, without its offset."""
        ...

    def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: TableRef) -> Reply[int]:
        """Writes the samples of a step as Parquet; returns the number of rows. `unscored`: see `join_samples`."""
        ...

    def write_evaluation(self, path: str, step: int, *tables: TableRef) -> Reply[int]:
        """Writes the readable columns of an evaluation's samples as Parquet; returns the number of rows."""
        ...

    def keep_groups(
        self, folder: str, request: KeepRequest, *tables: TableRef
    ) -> Reply[tuple[dict[str, KeptTable], ...]]:
        """Writes groups that a later run takes over; returns the place of each that fits, by kind of table."""
        ...

    def read_group(self, folder: str, kept: KeptTable) -> Reply[tuple[int, TableRef]]:
        """(rows, table) of one group from files that `keep_groups` wrote."""
        ...


class Reference(Replica, Protocol):
    """A frozen reference worker."""

    def packs(self) -> Reply[bool]:
        """Whether the model takes the rows of a micro-batch concatenated, without padding."""
        ...

    def score(self, plan: RankPlan, *rollouts: TableRef) -> Reply[tuple[ScoreSummary, TableRef]]:
        """Returns `ref_logprobs` of the plan's rows as a token-score table."""
        ...


class EngineTeacher(Reference, GuestEngine, Protocol):
    """A teacher's worker with an engine."""


class Trainer(Worker, Protocol):
    """One rank of a group of workers that train a model. All methods are collective unless they say otherwise."""

    def host(self) -> Reply[str]:
        """Name and address of the rank's machine. Not collective."""
        ...

    def rendezvous(self, *, one_host: bool) -> Reply[tuple[str, int]]:
        """Address and port at which the ranks meet, on one host or several. Called on rank 0; not collective."""
        ...

    def start(self, rendezvous: Rendezvous) -> Reply[WorkerHealth]:
        """Joins the group and loads the model."""
        ...

    def packs(self) -> Reply[bool]:
        """Whether all models of the rank take concatenated rows without padding. Not collective."""
        ...

    def offload_states(self) -> Reply[int]:
        """Moves what only an update needs to host memory, until the next update; returns the bytes. Not collective."""
        ...

    def save(self, directory: str) -> Reply[None]:
        """Writes this rank's part of a checkpoint."""
        ...

    def begin_save(self, directory: str, model: str = "", average: str = "") -> Reply[None]:
        """Copies what `save` and the named exports write, and begins to write it in the background."""
        ...

    def save_status(self, directory: str) -> Reply[SaveStatus]:
        """How far this rank has written what `begin_save` began. Not collective."""
        ...

    def try_save(self, directory: str) -> Reply[None]:
        """Writes what a checkpoint and an export consist of, with a small part of the weights. Not collective."""
        ...

    def load(self, directory: str) -> Reply[int]:
        """Loads this rank's part of a checkpoint; returns the number of ranks that saved it."""
        ...

    def digest(self) -> Reply[str]:
        """Digest of this rank's part of the weights, in the optimizer's precision. Not collective."""
        ...

    def keep_batch(
        self, folder: str, batch: TableRef, texts: TableRef | None = None, rows: Sequence[int] = ()
    ) -> Reply[dict[str, KeptFile]]:
        """Writes a step's batch, and these rows of its texts, to files. Not collective."""
        ...

    def export(self, directory: str, average: bool = False) -> Reply[None]:
        """Writes the model, or the moving average of its weights, as a Hugging Face folder."""
        ...


class Policy(Trainer, Protocol):
    """One rank of the policy."""

    def shares_prompts(self) -> Reply[bool]:
        """Whether the model can train the samples of a group behind one copy of their prompt exactly."""
        ...

    def compute_logprobs(self, plan: RankPlan, *rollouts: TableRef) -> Reply[tuple[ScoreSummary, TableRef]]:
        """Returns `old_logprobs` of the plan's rows as a token-score table."""
        ...

    def reference_logprobs(self, plan: RankPlan, *rollouts: TableRef) -> Reply[tuple[ScoreSummary, TableRef]]:
        """Returns `ref_logprobs` under the colocated reference as a token-score table."""
        ...

    def teacher_logprobs(self, plan: RankPlan, name: str, *tables: TableRef) -> Reply[tuple[ScoreSummary, TableRef]]:
        """Returns the log-probs of a teacher that has the policy's model, by the name of its role. `tables`: ROLLOUTS,
        and REWARDS if it reads feedback or demonstrations."""
        ...

    def prepare(self, request: PrepareRequest, *tables: TableRef) -> Reply[tuple[TrainSummary, TableRef]]:
        """Joins rollouts, rewards and token scores into a TRAIN table with advantages. Not collective."""
        ...

    def cut_texts(self, texts: TableRef, cuts: Sequence[TextCut]) -> Reply[tuple[tuple[TextSummary, ...], TableRef]]:
        """Tokenizes plain texts and splits them into pieces (PPO-ptx). Not collective."""
        ...

    def update(
        self, plan: RankPlan, batch: TableRef, kl_old_coef: float = 0.0, texts: TableRef | None = None
    ) -> Reply[UpdateMetrics]:
        """One optimizer step on the plan's rows of a TRAIN table, and on pieces of text (PPO-ptx)."""
        ...

    def token_records(self) -> Reply[tuple[int, TableRef]]:
        """(rows, TOKEN_RECORDS table) of this rank's updates since the last call, if they are kept. Not collective."""
        ...

    def store_distributions(self, plan: RankPlan, batch: TableRef, stride: int, weights: bool = False) -> Reply[None]:
        """Stores the policy's distributions at every `stride`-th state of the plan's rows, for `divergence`, and with
        `weights` also the weights, for `shorten_step`."""
        ...

    def divergence(self) -> Reply[tuple[float, int]]:
        """(sum, number of states) of KL(stored || now) in nats; discards what was stored."""
        ...

    def shorten_step(self, factor: float) -> Reply[tuple[float, int]]:
        """Moves the weights to stored + `factor` * (now - stored); returns the divergence there."""
        ...

    def discard_stored(self) -> Reply[None]: ...

    def publish_weights(self, version: int, base: str = "") -> Reply[WeightUpdate | None]:
        """Writes the file of weights as `version`; only rank 0 returns the update. `base`: see `read_delta`."""
        ...

    def read_weights(self, update: WeightUpdate) -> Reply[tuple[int, TableRef]]:
        """(bytes, payload) of a published version, for engines on other nodes. Not collective."""
        ...

    def read_delta(self, update: WeightUpdate) -> Reply[tuple[int, TableRef]]:
        """(bytes, delta) of the last version since its base; 0 bytes if the payload is cheaper. Not collective."""
        ...

    def connect_engines(self, link: EngineLink) -> Reply[None]:
        """Joins the rollout engines for transfers from device to device."""
        ...

    def send_weights(self, version: int) -> Reply[WeightsSent | None]:
        """Sends the weights to the connected engines as `version`; only rank 0 returns what was sent."""
        ...


class Critic(Trainer, Protocol):
    """One rank of the critic."""

    def compute_values(self, plan: RankPlan, *rollouts: TableRef) -> Reply[tuple[ScoreSummary, TableRef]]:
        """Returns `values` of the plan's rows as a token-score table."""
        ...

    def update(self, plan: RankPlan, batch: TableRef) -> Reply[UpdateMetrics]:
        """One optimizer step on the plan's rows of a TRAIN table."""
        ...


class ExampleTrainer(Trainer, Protocol):
    """One rank of a model that trains on offline data."""

    def tokenize(self, texts: TableRef) -> Reply[tuple[ExampleSummary, TableRef]]:
        """Tokenizes every example; returns an EXAMPLES table. Not collective."""
        ...

    def assemble(
        self, picks: Sequence[tuple[str, int]], examples: TableRef
    ) -> Reply[tuple[ExampleBatchSummary, TableRef]]:
        """Selects (name, row) pairs of an EXAMPLES table as an EXAMPLE_BATCH table. Not collective."""
        ...

    def attach(self, batch: TableRef, *scores: TableRef) -> Reply[tuple[int, TableRef]]:
        """Returns the batch with the reference's log-probs. Not collective."""
        ...

    def reference_logprobs(self, plan: RankPlan, *tables: TableRef) -> Reply[tuple[ScoreSummary, TableRef]]:
        """Returns `ref_logprobs` under the colocated reference as a token-score table."""
        ...

    def update(self, plan: RankPlan, batch: TableRef) -> Reply[UpdateMetrics]:
        """One optimizer step on the plan's rows of an EXAMPLE_BATCH table."""
        ...

    def evaluate(self, plan: RankPlan, batch: TableRef) -> Reply[EvaluationPart]:
        """This rank's share of the loss and metrics of the plan's rows."""
        ...

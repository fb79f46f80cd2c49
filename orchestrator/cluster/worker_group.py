"""Groups of workers with one typed method for each call: the only place in which the orchestrator names worker methods.

A `WorkerHandle` reaches one worker, whether a Ray actor (`orchestrator/cluster/ray_cluster.py`) or an object in this
process (`tests/fakes.py`). It takes the method as a function of the role's protocol (`workers/contract/roles.py`),
which carries parameter and return types from the worker to the caller. A group calls the ranks of one role together; of
engines and reward workers, which serve independently of each other, the pools hold the handles.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from troupe.orchestrator.cluster.adaptive_timeout import AdaptiveTimeouts
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.errors import WorkerDied
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.messages import (
    KeptFile,
    PrepareRequest,
    RankPlan,
    SaveStatus,
    ScoreSummary,
    TextCut,
    TextSummary,
    TrainSummary,
    UpdateMetrics,
    WeightsSent,
    WeightUpdate,
)
from troupe.workers.contract.offline_messages import EvaluationPart, ExampleBatchSummary, ExampleSummary
from troupe.workers.contract.roles import (
    Critic,
    EngineLink,
    ExampleTrainer,
    Policy,
    Reference,
    Reply,
    RolloutEngine,
    TableRef,
    Trainer,
    Worker,
)

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
W = TypeVar("W", bound=Worker)
W_co = TypeVar("W_co", bound=Worker, covariant=True)
TrainerT = TypeVar("TrainerT", bound=Trainer)

_PROBE_S = 5.0
"""Wait for an answer of a rank that may be dead. One that is alive may be busy for longer."""
Scores = list[tuple[ScoreSummary, TableRef]]
"""(summary, reference to a token-score table) for every share of the rows."""


class WorkerHandle(Protocol[W_co]):
    """One worker of a role."""

    @property
    def name(self) -> str: ...

    def call(
        self, method: Callable[Concatenate[W_co, P], Reply[R]], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        """Runs a method of the role's protocol and returns its result. Raises WorkerDied; WorkerTimeout after
        `timeout_s` seconds; WorkerRaised if the method raised; DataLost if an argument was lost with its node."""
        ...

    def call_for_table(
        self,
        method: Callable[Concatenate[W_co, P], Reply[tuple[R, TableRef]]],
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, tuple[R, TableRef]]:
        """Runs a method that returns (summary, table). The table stays where it is; its reference is returned."""
        ...

    def call_for_tables(
        self,
        method: Callable[Concatenate[W_co, P], Reply[tuple[R, *tuple[TableRef, ...]]]],
        tables: int,
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, tuple[R, list[TableRef]]]:
        """Runs a method that returns a summary and so many tables, each of which lives as long as its reference."""
        ...

    def kill(self) -> None: ...


Link = Callable[[Sequence[WorkerHandle[RolloutEngine]]], EngineLink]
"""Creates the link from the trainer to these engines."""


class ScoreTokens(Protocol):
    """A method of a group that scores tokens of the plans' rows, such as `ReferenceGroup.score`."""

    def __call__(self, plans: Sequence[RankPlan], *tables: TableRef, timeout_s: float) -> Coroutine[Any, Any, Scores]:
        """One plan for each share of the rows."""
        ...


class WorkerGroup(Generic[W]):
    """The ranks of one role, called together."""

    def __init__(
        self,
        role: str,
        workers: Sequence[WorkerHandle[W]],
        micro_batch_tokens: int,
        hung_s: float = math.inf,
        sequence_parallel_size: int = 1,
        calls: RecoverableCalls | None = None,
    ) -> None:
        """The ranks of a role. `hung_s` bounds calls that compute (`AdaptiveTimeouts`), not calls on files;
        `sequence_parallel_size` adjacent ranks share each micro-batch; `calls` repeats trainers' calls, or None
        if a lost rank is an error."""
        self.role = role
        self.workers = tuple(workers)
        self.micro_batch_tokens = micro_batch_tokens
        self.sequence_parallel_size = sequence_parallel_size
        self.packs = False
        """Whether the rows of a micro-batch are concatenated without padding; known once the group has started."""
        self._timeouts = AdaptiveTimeouts(hung_s)
        self._calls = calls or RecoverableCalls()

    @property
    def ranks(self) -> int:
        return len(self.workers)

    @property
    def data_parallel_size(self) -> int:
        """Number of shares that rows are divided into: one for the ranks that share their micro-batches."""
        return self.ranks // self.sequence_parallel_size

    @property
    def idle(self) -> bool:
        """Whether no call is under way, whose failure would tell of a lost worker."""
        return self._timeouts.idle

    async def _broadcast(
        self, method: Callable[Concatenate[W, P], Reply[R]], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """The same call on every rank; results by rank."""
        with self._timeouts.occupied():
            return await gather_all(worker.call(method, timeout_s, *args, **kwargs) for worker in self.workers)

    async def _compute(
        self, method: Callable[Concatenate[W, P], Reply[R]], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls every rank like `_broadcast`, for methods that compute only."""
        with self._timeouts.bounded(method.__name__, timeout_s) as bound_s:
            return await gather_all(worker.call(method, bound_s, *args, **kwargs) for worker in self.workers)

    async def _first(
        self,
        method: Callable[Concatenate[W, P], Reply[tuple[R, Any]]],
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, TableRef]:
        """Calls rank 0 alone like `_compute`, for methods that return (summary, table)."""
        with self._timeouts.bounded(method.__name__, timeout_s) as bound_s:
            return await self.workers[0].call_for_table(method, bound_s, *args, **kwargs)

    async def _scatter(
        self,
        method: Callable[Concatenate[W, A, P], Reply[R]],
        timeout_s: float,
        parts: Sequence[A],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """The same method with `parts[rank]` as first argument; results by rank."""
        with self._timeouts.bounded(method.__name__, timeout_s) as bound_s:
            return await gather_all(
                worker.call(method, bound_s, part, *args, **kwargs)
                for worker, part in zip(self.workers, parts, strict=True)
            )

    async def _run_plans(
        self,
        method: Callable[Concatenate[W, RankPlan, P], Reply[R]],
        timeout_s: float,
        plans: Sequence[RankPlan],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Runs `_scatter` with one plan for each share of the rows; returns results by share."""
        return self._by_share(await self._scatter(method, timeout_s, self._of_ranks(plans), *args, **kwargs))

    def _of_ranks(self, plans: Sequence[RankPlan]) -> list[RankPlan]:
        """The plan of each rank. Of the ranks that share a plan the first one writes the trace."""
        members = range(self.sequence_parallel_size)
        return [replace(plan, trace="") if member else plan for plan in plans for member in members]

    def _by_share(self, results: Sequence[R]) -> list[R]:
        """The results of the ranks without repetition: ranks that share their micro-batches have the same one."""
        return list(results[:: self.sequence_parallel_size])

    async def _score(
        self,
        method: Callable[Concatenate[W, RankPlan, P], Reply[tuple[ScoreSummary, TableRef]]],
        timeout_s: float,
        plans: Sequence[RankPlan],
        *tables: P.args,
        **kwargs: P.kwargs,
    ) -> Scores:
        """Calls the ranks like `_run_plans`, for methods that return (summary, table)."""
        with self._timeouts.bounded(method.__name__, timeout_s) as bound_s:
            scores = await gather_all(
                worker.call_for_table(method, bound_s, plan, *tables, **kwargs)
                for worker, plan in zip(self.workers, self._of_ranks(plans), strict=True)
            )
        return self._by_share(scores)


class TrainerGroup(WorkerGroup[TrainerT], ABC):
    """Ranks that train one model together. Methods that leave the trainers as they are repeat a call that failed
    because a rank was lost; of others only the caller knows what else to repeat."""

    gpu_memory: int = 0
    """Memory of the smallest GPU of the ranks in bytes, once they have started, or 0 without one."""
    gpu_ids: Mapping[str, str] = MappingProxyType({})
    """The number of the GPU on its node of every rank, by the rank's name, once they have started."""
    network: str = ""
    """How fast the network between the nodes of the ranks is; empty on one node."""

    async def restart(self, workers: Sequence[WorkerHandle[TrainerT]], timeout_s: float) -> None:
        """Starts other processes as the ranks, with their initial model."""
        self.workers = tuple(workers)
        await self.start(timeout_s)

    async def start(self, timeout_s: float) -> None:
        """Starts the ranks: rank 0 names the address at which all of them meet. Then asks whether they pack."""
        one_host = self.ranks == 1 or len(set(await self._broadcast(Trainer.host, timeout_s))) == 1
        address, port = await self.workers[0].call(Trainer.rendezvous, timeout_s, one_host=one_host)
        places = [Rendezvous(address=address, port=port, rank=r, world_size=self.ranks) for r in range(self.ranks)]
        started = await self._scatter(Trainer.start, timeout_s, places)
        self.gpu_memory = min(health.gpu_memory for health in started)
        self.network = started[0].network
        self.gpu_ids = {health.name: health.gpu_ids for health in started}
        self.packs = all(await self._broadcast(Trainer.packs, timeout_s))

    async def find_dead(self) -> WorkerDied | None:
        """A rank whose process has died, if there is one."""
        asked = (worker.call(Trainer.health, _PROBE_S) for worker in self.workers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return next((answer for answer in answers if isinstance(answer, WorkerDied)), None)

    @abstractmethod
    async def update(self, plans: Sequence[RankPlan], batch: TableRef, *, timeout_s: float) -> list[UpdateMetrics]:
        """One optimizer step on the rows of the plans, one for each share; results by share."""

    async def offload_states(self, *, timeout_s: float) -> int:
        """Frees the ranks' GPUs of what only an update needs; returns the bytes freed on all of them."""
        return sum(await self._compute(Trainer.offload_states, timeout_s))

    async def save(self, directory: str, *, timeout_s: float) -> None:
        await self._broadcast(Trainer.save, timeout_s, directory)

    async def begin_save(self, directory: str, model: str = "", average: str = "", *, timeout_s: float) -> None:
        """Copies what `save` and the named exports write, which is written in the background."""
        await self._broadcast(Trainer.begin_save, timeout_s, directory, model, average)

    async def save_status(self, directory: str, *, timeout_s: float) -> SaveStatus:
        """Status of the save: done once all ranks are, with the first failure of each kind."""
        ranks = await self._broadcast(Trainer.save_status, timeout_s, directory)
        return SaveStatus(
            all(rank.done for rank in ranks),
            next((rank.failed for rank in ranks if rank.failed), ""),
            next((rank.export_failed for rank in ranks if rank.export_failed), ""),
        )

    async def try_save(self, directory: str, *, timeout_s: float) -> None:
        """Writes what a checkpoint and an export consist of, with a small part of the weights."""
        await self._broadcast(Trainer.try_save, timeout_s, directory)

    async def load(self, directory: str, *, timeout_s: float) -> int:
        """Loads a checkpoint; returns the number of ranks that saved it."""
        return (await self._broadcast(Trainer.load, timeout_s, directory))[0]

    async def digest(self, *, timeout_s: float) -> str:
        """Digest of the weights, in the optimizer's precision: of the digests of the ranks' parts."""
        parts = await self._calls.retry(lambda: self._compute(Trainer.digest, timeout_s))
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()

    async def keep_batch(
        self, folder: str, batch: TableRef, texts: TableRef | None, rows: Sequence[int], *, timeout_s: float
    ) -> dict[str, KeptFile]:
        """Makes rank 0 write a step's batch, and these rows of its texts, to files."""

        async def keep() -> dict[str, KeptFile]:
            with self._timeouts.occupied():
                return await self.workers[0].call(Trainer.keep_batch, timeout_s, folder, batch, texts, rows)

        return await self._calls.retry(keep)

    async def export(self, directory: str, average: bool = False, *, timeout_s: float) -> None:
        """Writes the model, or the moving average of its weights, as a Hugging Face folder."""
        await self._broadcast(Trainer.export, timeout_s, directory, average)


class PolicyGroup(TrainerGroup[Policy]):
    """The ranks of the policy."""

    shares_prompts = False
    """Whether the samples of a group are trained behind one copy of their prompt."""
    updates = 0
    """Updates that have begun: while their number is the same, so are the weights."""

    async def start(self, timeout_s: float) -> None:
        """Starts the ranks and asks whether their model can share prompts exactly."""
        await super().start(timeout_s)
        self.shares_prompts = all(await self._broadcast(Policy.shares_prompts, timeout_s))

    async def compute_logprobs(self, plans: Sequence[RankPlan], *rollouts: TableRef, timeout_s: float) -> Scores:
        return await self._calls.retry(lambda: self._score(Policy.compute_logprobs, timeout_s, plans, *rollouts))

    async def reference_logprobs(self, plans: Sequence[RankPlan], *rollouts: TableRef, timeout_s: float) -> Scores:
        return await self._calls.retry(lambda: self._score(Policy.reference_logprobs, timeout_s, plans, *rollouts))

    def teacher(self, name: str) -> ScoreTokens:
        """The scoring of a teacher that is the policy, by the name of its role."""

        async def score(plans: Sequence[RankPlan], *rollouts: TableRef, timeout_s: float) -> Scores:
            return await self._calls.retry(
                lambda: self._score(Policy.teacher_logprobs, timeout_s, plans, name, *rollouts)
            )

        return score

    async def prepare(
        self, request: PrepareRequest, *tables: TableRef, timeout_s: float
    ) -> tuple[TrainSummary, TableRef]:
        """Joins rollouts, rewards and token scores into a batch with advantages."""
        return await self._calls.retry(lambda: self._first(Policy.prepare, timeout_s, request, *tables))

    async def cut_texts(
        self, texts: TableRef, cuts: Sequence[TextCut], *, timeout_s: float
    ) -> tuple[tuple[TextSummary, ...], TableRef]:
        return await self._calls.retry(lambda: self._first(Policy.cut_texts, timeout_s, texts, cuts))

    async def update(
        self,
        plans: Sequence[RankPlan],
        batch: TableRef,
        kl_old_coef: float = 0.0,
        texts: TableRef | None = None,
        *,
        timeout_s: float,
    ) -> list[UpdateMetrics]:
        """One optimizer step on the plans' rows of the batch, and on pieces of TEXTS in the same step (PPO-ptx)."""
        self.updates += 1
        return await self._run_plans(Policy.update, timeout_s, plans, batch, kl_old_coef, texts)

    async def token_records(self, *, timeout_s: float) -> list[TableRef]:
        """Results of the updates for every token since the last call, by share. Call it after a step's updates."""
        with self._timeouts.bounded(Policy.token_records.__name__, timeout_s) as bound_s:
            workers = self._by_share(self.workers)
            calls = (worker.call_for_table(Policy.token_records, bound_s) for worker in workers)
            return [table for _, table in await gather_all(calls)]

    async def store_distributions(
        self, plans: Sequence[RankPlan], batch: TableRef, stride: int, weights: bool, *, timeout_s: float
    ) -> None:
        """Keeps the policy's distributions at every `stride`-th state of the plans' rows, and its `weights`."""
        await self._run_plans(Policy.store_distributions, timeout_s, plans, batch, stride, weights)

    async def divergence(self, *, timeout_s: float) -> float:
        """KL(held || now) per token at the states held, in nats."""
        return _mean_per_state(await self._compute(Policy.divergence, timeout_s))

    async def shorten_step(self, factor: float, *, timeout_s: float) -> float:
        """Moves the weights to held + `factor` * (now - held); returns the divergence there."""
        return _mean_per_state(await self._compute(Policy.shorten_step, timeout_s, factor))

    async def discard_stored(self, *, timeout_s: float) -> None:
        await self._compute(Policy.discard_stored, timeout_s)

    async def publish_weights(self, version: int, *, base: str = "", timeout_s: float) -> WeightUpdate:
        """Writes the file of weights as `version`; `base`: digest of the version that `read_delta` will start from."""
        published = await self._compute(Policy.publish_weights, timeout_s, version, base)
        return next(update for update in published if update is not None)

    async def read_weights(self, update: WeightUpdate, *, timeout_s: float) -> TableRef:
        """Reference to the bytes of a published version, for engines on other nodes."""
        return (await self._first(Policy.read_weights, timeout_s, update))[1]

    async def read_delta(self, update: WeightUpdate, *, timeout_s: float) -> tuple[int, TableRef]:
        """(bytes, reference to the delta) of the last published version; 0 bytes: the whole payload is cheaper."""
        return await self._first(Policy.read_delta, timeout_s, update)

    async def connect_engines(self, link: EngineLink, *, timeout_s: float) -> None:
        """Joins the rollout engines for transfers from device to device."""
        await self._broadcast(Policy.connect_engines, timeout_s, link)

    async def send_weights(self, version: int, *, timeout_s: float) -> WeightsSent:
        """Sends the weights to the connected engines as `version`."""
        sent = await self._broadcast(Policy.send_weights, timeout_s, version)
        return next(report for report in sent if report is not None)


def _mean_per_state(parts: Sequence[tuple[float, int]]) -> float:
    """The ranks' sums over states as one mean; 0 without states."""
    return sum(total for total, _ in parts) / max(1, sum(states for _, states in parts))


class CriticGroup(TrainerGroup[Critic]):
    """The ranks of the critic."""

    async def compute_values(self, plans: Sequence[RankPlan], *rollouts: TableRef, timeout_s: float) -> Scores:
        return await self._calls.retry(lambda: self._score(Critic.compute_values, timeout_s, plans, *rollouts))

    async def update(self, plans: Sequence[RankPlan], batch: TableRef, *, timeout_s: float) -> list[UpdateMetrics]:
        return await self._run_plans(Critic.update, timeout_s, plans, batch)


class ReferenceGroup(WorkerGroup[Reference]):
    """The workers of the frozen reference, which score shares of the same rows."""

    async def start(self, timeout_s: float) -> None:
        """Asks the workers, which are started one by one, whether they pack."""
        self.packs = all(await self._broadcast(Reference.packs, timeout_s))

    async def score(self, plans: Sequence[RankPlan], *rollouts: TableRef, timeout_s: float) -> Scores:
        return await self._score(Reference.score, timeout_s, plans, *rollouts)


class ExampleGroup(TrainerGroup[ExampleTrainer]):
    """The ranks of a model that trains on offline data."""

    async def tokenize(self, texts: TableRef, *, timeout_s: float) -> tuple[ExampleSummary, TableRef]:
        return await self._calls.retry(lambda: self._first(ExampleTrainer.tokenize, timeout_s, texts))

    async def assemble(
        self, picks: Sequence[tuple[str, int]], examples: TableRef, *, timeout_s: float
    ) -> tuple[ExampleBatchSummary, TableRef]:
        """Selects (name, row) pairs of the tokenized examples as a batch."""
        return await self._calls.retry(lambda: self._first(ExampleTrainer.assemble, timeout_s, picks, examples))

    async def attach(self, batch: TableRef, *scores: TableRef, timeout_s: float) -> TableRef:
        _, table = await self._calls.retry(lambda: self._first(ExampleTrainer.attach, timeout_s, batch, *scores))
        return table

    async def reference_logprobs(self, plans: Sequence[RankPlan], *tables: TableRef, timeout_s: float) -> Scores:
        return await self._calls.retry(
            lambda: self._score(ExampleTrainer.reference_logprobs, timeout_s, plans, *tables)
        )

    async def update(self, plans: Sequence[RankPlan], batch: TableRef, *, timeout_s: float) -> list[UpdateMetrics]:
        return await self._run_plans(ExampleTrainer.update, timeout_s, plans, batch)

    async def evaluate(self, plans: Sequence[RankPlan], batch: TableRef, *, timeout_s: float) -> list[EvaluationPart]:
        """The loss and metrics of the plans' rows, by share."""
        return await self._calls.retry(lambda: self._run_plans(ExampleTrainer.evaluate, timeout_s, plans, batch))

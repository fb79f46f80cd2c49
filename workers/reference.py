"""The reference worker: a frozen model that scores samples, whole or divided over several processes with a GPU each.

A divided model is ZeRO-3 without training. The worker's process is rank 0; it starts the others, and all end together.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import pyarrow as pa
import torch

from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import ReferenceConfig, Rendezvous
from troupe.workers.contract.messages import Peak, RankPlan, ScoreSummary, WorkerHealth
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.data.teacher_prompts import TeacherPrompts
from troupe.workers.isolation.lifetime import exit_with
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.distillation import top_tokens
from troupe.workers.models.modeling import (
    CausalLogprobs,
    head_chunks,
    load_causal,
    longest_row,
    score_plan,
    torch_dtype,
)
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.group import LOOPBACK, join_group, leave_group, open_store
from troupe.workers.training.rank import own_peak, prepare_torch, worker_health
from troupe.workers.training.zero3 import FrozenModule, ZeroPartitioner, place_frozen


class ReferenceWorker:
    """Scores samples under a frozen model. Workers of this role are independent of each other."""

    def __init__(self, config: ReferenceConfig, name: str) -> None:
        pickle_tables()
        self._config = config
        self._name = name
        self._model: ReferenceModel | ShardedReference | None = None
        self._prompts: TeacherPrompts | None = None

    def start(self) -> WorkerHealth:
        """Load the model, divided over several processes if `shards` says so. Raises OSError if it is missing."""
        prepare_torch(self._config.threads)
        announce(Activity.MODEL)
        config = self._config
        self._model = ReferenceModel(config) if config.shards == 1 else ShardedReference(config)
        if config.prompt is not None:
            longest, most = self._model.longest, config.micro_batch_tokens
            self._prompts = TeacherPrompts(config.prompt, config.tokenizer or config.model, longest, most)
        return self.health()

    def packs(self) -> bool:
        return self._started.packs

    def score(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """(summary, token_scores table): log-probs of the plan's rows. Raises RuntimeError before `start`."""
        score = self._started.score
        return score(plan, rollouts) if self._prompts is None else self._prompts.score(score, plan, rollouts)

    def health(self) -> WorkerHealth:
        return worker_health(self._name, 0, self._config.device)

    def close(self) -> None:
        if isinstance(self._model, ShardedReference):
            self._model.close()
        self._model = None

    @property
    def _started(self) -> ReferenceModel | ShardedReference:
        if self._model is None:
            raise RuntimeError(f"{self._name} has not been started")
        return self._model


logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class ReferenceModel:
    """A frozen causal model, whole or this rank's part of it, that scores micro-batches."""

    def __init__(self, config: ReferenceConfig) -> None:
        """Load the model. Collective in its group if it is divided. Raises OSError if the model is missing."""
        self._device = torch.device(config.device)
        dtype = torch_dtype(config.model.dtype)
        model = load_causal(config.model, ZeroPartitioner(_trainer(config), dtype) if config.shards > 1 else None)
        chunks = head_chunks(model.config.get_text_config().vocab_size, config.micro_batch_tokens, config.device)
        module = CausalLogprobs(model, config.temperature, chunks)
        self.packs = adapt(module, model, config.device, packing=True)
        """Whether the model takes the rows of a micro-batch concatenated, without padding."""
        self.longest = longest_row(model, config.micro_batch_tokens)
        """Most tokens of a row."""
        self._placed: FrozenModule = place_frozen(module, _trainer(config), self._device)
        self._config = config

    def score(self, plan: RankPlan, rollouts: Sequence[pa.Table]) -> tuple[ScoreSummary, pa.Table]:
        """The log-probs of the plan's rows, and this rank's peak. Collective if the model is divided."""
        reader = top_tokens(self._config.top_k)
        summary, table = score_plan(self._placed.module, plan, rollouts, self._config.column, self._device, reader)
        return replace(summary, peak=own_peak(self._config.device)), table


class ShardedReference:
    """A reference model divided over this process and those that it starts; one that ends takes this one with it."""

    def __init__(self, config: ReferenceConfig) -> None:
        """Start the other ranks, join them and load the model. Raises OSError if the model is missing."""
        self._store = open_store(LOOPBACK)
        self._connections: list[Connection] = []
        self._closing = threading.Event()
        self._processes = [self._started(config, rank) for rank in range(1, config.shards)]
        sentinels = [process.sentinel for process in self._processes]
        threading.Thread(target=self._exit_after, args=(sentinels,), name="ranks of the model", daemon=True).start()
        join_group(_rendezvous(config, 0, self._store.port), config.device, self._store)
        self._model = ReferenceModel(config)
        self.packs = self._model.packs
        """Whether the model packs rows, as in `ReferenceModel.packs`."""
        self.longest = self._model.longest
        """Most tokens of a row."""

    def score(self, plan: RankPlan, rollouts: Sequence[pa.Table]) -> tuple[ScoreSummary, pa.Table]:
        """The log-probs of the plan's rows, shared by the ranks. Raises OSError after an error: the other ranks'
        answers would be taken for the next call's."""
        own, *others = shares(plan, 1 + len(self._connections))
        try:
            for connection, share in zip(self._connections, others, strict=True):
                connection.send((share, rollouts))
            scored = [self._model.score(own, rollouts)]
            scored += [connection.recv() for connection in self._connections]
            summaries, tables = zip(*scored, strict=True)
        except BaseException:
            self._end_ranks()  # they may wait for this one in a collective
            raise
        peaks = [one.peak for one in summaries if one.peak is not None]
        peak = Peak(sum(part.host for part in peaks), max(part.gpu for part in peaks))
        failed = {key: why for one in summaries for key, why in one.failed.items()}
        return ScoreSummary(sum(one.rows for one in summaries), failed, peak=peak), pa.concat_tables(tables)

    def close(self) -> None:
        """End the other ranks and leave their group."""
        self._end_ranks()
        leave_group()

    def _end_ranks(self) -> None:
        self._closing.set()
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.kill()
            process.join()

    def _started(self, config: ReferenceConfig, rank: int) -> BaseProcess:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._connections.append(ours)
        arguments = (config, rank, self._store.port, theirs, os.getpid())
        process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()
        return process

    def _exit_after(self, sentinels: Sequence[int]) -> None:
        wait(sentinels)
        if not self._closing.is_set():
            logger.error("a process of the divided model has ended, so this one ends, too")
            os._exit(1)


def shares(plan: RankPlan, ranks: int) -> list[RankPlan]:
    """The micro-batches of a plan dealt out to `ranks` ranks, with empty ones so that each has the same number."""
    empty = -len(plan.micro_batches) % ranks
    padded = [*plan.micro_batches, *[()] * empty]
    return [replace(plan, micro_batches=tuple(padded[rank::ranks])) for rank in range(ranks)]


def _serve(config: ReferenceConfig, rank: int, port: int, requests: Connection, owner: int) -> None:
    """A rank other than the first: score shares until the owner ends it, or ends."""
    exit_with(owner)
    pickle_tables()
    if config.device == "cuda":  # like every rank, it sees one GPU only
        os.environ[_VISIBLE] = os.environ[_VISIBLE].split(",")[rank]
    prepare_torch(config.threads)
    join_group(_rendezvous(config, rank, port), config.device)
    model = ReferenceModel(config)
    receive: Callable[[], tuple[RankPlan, Sequence[pa.Table]]] = requests.recv
    while True:
        requests.send(model.score(*receive()))


def _rendezvous(config: ReferenceConfig, rank: int, port: int) -> Rendezvous:
    return Rendezvous(address=LOOPBACK, port=port, rank=rank, world_size=config.shards)


def _trainer(config: ReferenceConfig) -> TrainerConfig:
    """Settings that DeepSpeed requires, although nothing trains."""
    return TrainerConfig(zero_stage=3, micro_batch_tokens=config.micro_batch_tokens, threads=config.threads)

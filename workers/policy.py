"""The policy: log-probs of sampled tokens, updates, and weights for the rollout engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import pyarrow as pa
import torch
import torch.distributed as dist

from troupe.workers.algorithms.policy_loss import (
    LossOutput,
    PolicyTokens,
    exact_kl,
    loss_by_source,
    policy_loss,
    policy_tokens,
)
from troupe.workers.algorithms.score_centering import SamplerTokens
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import DistillConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig
from troupe.workers.contract.imports import resolve
from troupe.workers.contract.messages import (
    TOKEN_RECORDS,
    PrepareRequest,
    RankPlan,
    ScoreSummary,
    TextCut,
    TextSummary,
    TrainSummary,
    UpdateMetrics,
    WeightsSent,
    WeightUpdate,
    WorkerHealth,
    kind_of,
)
from troupe.workers.contract.roles import EngineLink
from troupe.workers.contract.weight_backends import BACKENDS
from troupe.workers.data.teacher_prompts import TeacherPrompts, told_in
from troupe.workers.data.texts import cut_sources, text_batches
from troupe.workers.data.tokenizer import load_tokenizer
from troupe.workers.models.adapter_files import AdapterBeside, read_adapter
from troupe.workers.models.distillation import LogitsReader, SquareSums, WholeTeacher, WholeTeachers, top_tokens
from troupe.workers.models.modeling import CausalLogprobs, evaluating, longest_row, score_plan
from troupe.workers.models.route_replay import RouteReplay
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.training.adapter import ModelAdapter
from troupe.workers.training.deepspeed_engine import Forward, StepResult
from troupe.workers.training.master_weights import WeightSnapshot
from troupe.workers.training.meter import TokenRecorder
from troupe.workers.training.natural_gradient import NaturalGradient
from troupe.workers.training.rank import OutputT, TrainingRank, Work, loss_metrics
from troupe.workers.training.zero3 import FrozenModule
from troupe.workers.weights.device_sender import DeviceSender, device_sender
from troupe.workers.weights.file import RankWeights, WeightPublisher, read_payload
from troupe.workers.weights.shared_memory import Bytes
from troupe.workers.weights.store import StoredBytes, WeightStore


class PolicyWorker(TrainingRank[PolicyConfig]):
    """One rank of the policy's training group."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(config, name)
        self._publisher: WeightPublisher | None = None
        self._weight_store: WeightStore | None = None
        self._sender: DeviceSender | None = None
        self._stored_distributions: list[tuple[TokenBatch, torch.Tensor]] = []
        self._weights_before: WeightSnapshot | None = None
        self._natural: NaturalGradient | None = None
        self._teachers: dict[str, FrozenModule] = {}
        """The teachers that are frozen models, by role."""
        self._shared: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        """Blocks inside which the policy's model is a teacher that has it with another adapter, by role."""
        self._records = TokenRecorder() if config.records_tokens else None

    @property
    def _distill(self) -> DistillConfig:
        return self._config.loss.distill

    @property
    def _logits_readers(self) -> int:
        whole = len(self._config.teachers) if self._distill.in_process else 1
        return max(1, whole) if self._config.loss.reads_logits else 0

    @property
    def _shares_memory(self) -> bool:
        return BACKENDS[self._config.transfer_backend].shared_gpu is True

    def build(self) -> WorkerHealth:
        """Load the models; see `TrainingRank.build`. Raises ValueError if the environment has variables that prevent
        sending weights, the model has no routers to replay, or a teacher's adapter does not fit it, and StoreFailed if
        the object store for weights cannot be used."""
        config = self._config
        if (check := BACKENDS[config.transfer_backend].check) is not None:
            resolve(check)(os.environ)
        if config.weight_store is not None and dist.get_rank() == 0:
            self._weight_store = WeightStore(config.weight_store, config.run_id)
        temperature = config.sampling.temperature
        adapter = self._train_policy(config.reference_model, temperature, config.loss.entropy_coef > 0)
        self._teachers = {name: self._load_frozen(one, temperature) for name, one in config.teacher_models.items()}
        self._shared = {name: self._teacher_in(adapter, name, path) for name, path in config.teacher_adapters.items()}
        if config.sampling.router_replay:
            module = cast(CausalLogprobs, self.engine.module)
            module.replay = RouteReplay(module.model)
        if config.natural_gradient is not None:
            module = cast(CausalLogprobs, self.engine.module)
            self._natural = NaturalGradient(module, config.natural_gradient, self._device)
        if config.device == "cuda":
            torch.cuda.empty_cache()  # an engine on the same GPU sizes its KV cache by what is free
        return self.health()

    def compute_logprobs(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        reader = SquareSums() if self._config.advantage.reads_square_sums else None
        device, routed = self.engine.device, self._config.sampling.router_replay
        return score_plan(self.engine.module, plan, rollouts, "old_logprobs", device, reader, routed)

    def teacher_logprobs(self, plan: RankPlan, name: str, *tables: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """(summary, token_scores table): the rows under a frozen model, the policy, its average or its model with the
        teacher's adapter, behind this teacher's prompts. `tables`: ROLLOUTS, and REWARDS if the teacher reads
        feedback or demonstrations."""
        rollouts = [table for table in tables if kind_of(table) == "rollouts"]
        teacher, reader = self._config.teachers[name], top_tokens(self._distill.stored_k)
        module = self._teachers[name].module if name in self._teachers else self.engine.module

        def score(plan: RankPlan, tables: Sequence[pa.Table]) -> tuple[ScoreSummary, pa.Table]:
            return score_plan(module, plan, tables, name, self.engine.device, reader)

        with self._as_teacher(name):
            if teacher.prompt is None:
                return score(plan, rollouts)
            most = self._config.trainer.micro_batch_tokens
            longest = longest_row(cast(CausalLogprobs, module).model, most)
            prompts = TeacherPrompts(teacher.prompt, self._config.model, longest, most)
            told = told_in(teacher.prompt, teacher.demonstration_reward, tables) if teacher.reads_rewards else None
            return prompts.score(score, plan, rollouts, told)

    def _teacher_in(
        self, trained: ModelAdapter | None, name: str, folder: str
    ) -> Callable[[], AbstractContextManager[None]]:
        """Blocks inside which the policy's model has the adapter in a folder. Raises OSError or ValueError."""
        if trained is None:
            raise ValueError(f"roles.{name}.model.adapter needs roles.policy.lora: all weights of the policy train")
        adapter = read_adapter(folder)
        adapter.require_base(self._config.model.path)
        return partial(trained.replaced_by, AdapterBeside(cast(CausalLogprobs, self.engine.module).model, adapter))

    def _as_teacher(self, name: str) -> AbstractContextManager[None]:
        """Inside the block the policy's model is this teacher."""
        if name in self._shared:
            return self._shared[name]()
        return self.engine.averaged() if self._config.teachers[name].average else nullcontext()

    def shares_prompts(self) -> bool:
        """Whether samples of a group train behind one copy of their prompt: if configured, and packed."""
        return self._config.share_prompts and self._packs

    def prepare(self, request: PrepareRequest, *tables: pa.Table) -> tuple[TrainSummary, pa.Table]:
        whole = tuple(self._config.teachers) if self._distill.in_process else ()
        return prepare(self._config.advantage, request, tables, self._config.source_advantages, whole)

    def cut_texts(self, texts: pa.Table, cuts: Sequence[TextCut]) -> tuple[tuple[TextSummary, ...], pa.Table]:
        return cut_sources(load_tokenizer(self._config.model), texts, cuts)

    def update(
        self, plan: RankPlan, batch: pa.Table, kl_old_coef: float = 0.0, texts: pa.Table | None = None
    ) -> UpdateMetrics:
        """One optimizer step on rows of TRAIN and TEXTS (PPO-ptx); `kl_old_coef` weighs KL(old || new). Collective."""
        table = TokenTable(batch, self._config.sampling.router_replay)
        # The texts are trained on even if no row has a signal.
        micro_batches = plan.micro_batches or ((),)
        work = [partial(self._of_rollouts, table, plan, kl_old_coef, rows) for rows in micro_batches]
        if texts is not None and plan.texts is not None:
            tokens = plan.texts.total_loss_tokens
            work += [partial(self._of_texts, tokens, part) for part in text_batches(texts, plan.texts)]
        update = self._update(plan, work)
        if self._records is not None:
            self._records.end_update(batch)
        metrics = loss_metrics(update, self._device)
        loss = metrics.sums["loss"] + self._config.ptx_coef * metrics.sums.get("ptx_loss", 0.0)
        return replace(metrics, sums=metrics.sums | {"loss": loss})

    def _step(
        self, work: Sequence[Work[OutputT]], loss_of: Callable[[Forward, Work[OutputT]], torch.Tensor]
    ) -> StepResult:
        if self._natural is None:
            return super()._step(work, loss_of)
        return self.engine.move(partial(self._natural.step, work, loss_of))

    def token_records(self) -> tuple[int, pa.Table]:
        """(rows, TOKEN_RECORDS table) of the updates since the last call, from each row's forward pass."""
        table = TOKEN_RECORDS.empty_table() if self._records is None else self._records.take()
        return table.num_rows, table

    def store_distributions(self, plan: RankPlan, batch: pa.Table, stride: int, weights: bool = False) -> None:
        """Store the policy's distributions at every `stride`-th state of each micro-batch (states x vocabulary x 4
        bytes), and the `weights` for `shorten_step`. Collective."""
        self._weights_before = self.engine.snapshot_weights() if weights else None
        parts = TokenTable(batch, self._config.sampling.router_replay).batches(plan)
        batches = [part.sampled(stride).to(self.engine.device) for part in parts]
        self._stored_distributions = [(part, self._distributions(part)) for part in batches]

    def divergence(self) -> tuple[float, int]:
        """(sum over the stored states, their number) of the exact KL(stored || current) in nats. Collective.
        Discards the distributions, unless the weights are stored too."""
        held = self._stored_distributions
        if self._weights_before is None:
            self._stored_distributions = []
        total = sum(float(exact_kl(old, self._distributions(part)).double().sum()) for part, old in held)
        return total, sum(len(part.positions) for part, _ in held)

    def shorten_step(self, factor: float) -> tuple[float, int]:
        """`divergence` after moving the weights to stored + `factor` * (current - stored). Collective."""
        if self._weights_before is None:
            raise RuntimeError(f"{self._name} holds no weights of before the step")
        self._weights_before.shorten(factor)
        return self.divergence()

    def discard_stored(self) -> None:
        self._stored_distributions, self._weights_before = [], None

    def publish_weights(self, version: int, base: str = "") -> WeightUpdate | None:
        """Write the file of weights as `version`; rank 0 returns an update. `base`: for `read_delta`. Collective."""
        self._version = version
        if self._weight_store is not None:
            self._weight_store.clear()
        return self._weight_publisher().publish(version, base)

    def read_weights(self, update: WeightUpdate) -> tuple[int, Bytes | StoredBytes]:
        """(number of bytes, uint8 payload) of a published version, for engines on other nodes."""
        return update.nbytes, self._stored(f"{update.version}.weights", read_payload(update))

    def read_delta(self, update: WeightUpdate) -> tuple[int, Bytes | StoredBytes]:
        """(number of bytes, delta) of the last published version since its base; 0 if the whole payload is cheaper."""
        delta = self._weight_publisher().delta(update)
        return delta.nbytes, self._stored(f"{update.version}.delta", delta) if delta.nbytes else delta

    def connect_engines(self, link: EngineLink) -> None:
        """Join the rollout engines for transfers from device to device. Collective. nccl is untested on GPU."""
        self._disconnect()
        engine = self.engine
        self._sender = device_sender(
            self._config.transfer_backend, link, engine.weight_shapes(), engine.rank, engine.device
        )

    def send_weights(self, version: int) -> WeightsSent | None:
        if self._sender is None:
            raise RuntimeError(f"{self._name} is not connected to any engine")
        self._version = version
        return self._sender.send(version, self.engine.named_weights())

    def release(self) -> None:
        """Release the models and the engines, and remove the published file."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._weight_store is not None:
            self._weight_store.close()
            self._weight_store = None
        self._disconnect()
        self.discard_stored()
        self._natural, self._teachers, self._shared = None, {}, {}
        super().release()

    def _stored(self, name: str, content: Bytes) -> Bytes | StoredBytes:
        """The bytes, or their location in the object store."""
        return content if self._weight_store is None else self._weight_store.put(name, content)

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _weight_publisher(self) -> WeightPublisher:
        if self._publisher is None:
            row, engine = BACKENDS[self._config.transfer_backend], self.engine
            if row.publisher is None:
                raise RuntimeError(f"{self._name}: {row.name} writes no file")
            weights = RankWeights(engine.named_weights, engine.weight_shapes(), engine.rank, engine.gathers)
            publisher: WeightPublisher = resolve(row.publisher)(weights, self._config.run_id)
            self._publisher = publisher
        return self._publisher

    def _distributions(self, batch: TokenBatch) -> torch.Tensor:
        module = cast(CausalLogprobs, self.engine.module)
        with evaluating(module):
            return module.distributions(batch)

    def _of_texts(self, total_tokens: int, part: TokenBatch, forward: Forward) -> tuple[TokenBatch, LossOutput]:
        """A micro-batch's share of the texts' mean negative log-likelihood per token, at temperature 1."""
        micro_batch = part.to(self.engine.device)
        logprobs, _ = forward(batch=micro_batch, temperature=1.0)
        loss = -logprobs.sum() / max(total_tokens, 1)
        return micro_batch, LossOutput(self._config.ptx_coef * loss, {"ptx_loss": loss.detach()}, sums={}, maxima={})

    def _reader(self, table: TokenTable, micro_batch: TokenBatch) -> tuple[LogitsReader | None, tuple[str, ...]]:
        """What reads more of a micro-batch's distributions than the sampled token, and the fields of `PolicyTokens`
        that it reads."""
        loss = self._config.loss
        if loss.recorded_top_k:
            return SamplerTokens(*table.likeliest(micro_batch), loss.importance), ("centering", "sampler_mass")
        return (self._teacher(table, micro_batch), ("divergences",)) if loss.distill.coef else (None, ())

    def _teacher(self, table: TokenTable, micro_batch: TokenBatch) -> LogitsReader:
        """See `TrainingRank._teacher`. A role that teaches no row of the micro-batch computes nothing."""
        names = tuple(self._config.teachers)
        if not self._distill.in_process or not names:
            return super()._teacher(table, micro_batch)
        weights = table.teacher_weights(micro_batch, len(names))
        taught = weights.any(0).nonzero().flatten()
        return WholeTeachers([self._whole_teacher(names[n], micro_batch) for n in taught.tolist()], weights[:, taught])

    def _whole_teacher(self, name: str, micro_batch: TokenBatch) -> WholeTeacher:
        """A frozen model, or the policy's average before the update."""
        if name in self._teachers:
            return self._whole(self._teachers[name].module, micro_batch)
        module = cast(CausalLogprobs, self.engine.module)
        with self.engine.averaged():
            states, head = module.teacher_states(replace(micro_batch, routes=None)), module.current_head()
        return WholeTeacher(states, head, module.temperature, self._distill)

    def _of_rollouts(
        self, table: TokenTable, plan: RankPlan, kl_old_coef: float, rows: Sequence[int], forward: Forward
    ) -> tuple[TokenBatch, LossOutput]:
        micro_batch, loss = table.cut(rows, plan).to(self.engine.device), self._config.loss
        reader, names = self._reader(table, micro_batch)
        # A likelihood does not depend on who sampled a token: it is the model's own.
        logprobs, entropy, *read = (
            forward(batch=micro_batch, reader=reader)
            if loss.has_ratio
            else forward(batch=replace(micro_batch, kept=None), temperature=1.0, reader=reader)
        )
        # A step that is searched for scores the rows again, without a gradient.
        if self._records is not None and torch.is_grad_enabled():
            self._records.note(micro_batch, logprobs, entropy)
        max_tokens = self._config.sampling.max_tokens

        def tokens(own: PolicyLossConfig) -> PolicyTokens:
            found = policy_tokens(table, micro_batch, plan, own, max_tokens, logprobs, entropy)
            if self._natural is not None and found.old_logprobs is None:
                raise ValueError("the line search compares with the policy of before: the batch lacks old_logprobs")
            return replace(found, **dict(zip(names, read, strict=True)))

        if not self._config.source_losses:
            return micro_batch, policy_loss(tokens(loss), loss, kl_old_coef)
        losses = {"": loss, **self._config.source_losses}
        return micro_batch, loss_by_source(losses, table, micro_batch, tokens, kl_old_coef)

"""The policy: log-probs of what was sampled, updates, and weights for the rollout engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from workers.config import PolicyConfig, Rendezvous
from workers.deepspeed_engine import TrainEngine
from workers.losses import LossOutput, PolicyTokens, exact_kl, policy_loss, token_weights
from workers.messages import (
    PrepareRequest,
    RankPlan,
    TextSummary,
    TrainSummary,
    UpdateMetrics,
    WeightUpdate,
    WorkerHealth,
)
from workers.modeling import CausalLogprobs, head_chunks, load_causal, score_plan, shares_prompts
from workers.prepare import prepare
from workers.rank import TrainingRank, free_port, own_address, update_metrics
from workers.shared_file import shared_directory
from workers.tensors import TokenBatch, TokenTable
from workers.texts import cut_texts, text_batches
from workers.weight_file import WeightPublisher, read_payload

Forward = Callable[..., Any]


class Sender(Protocol):
    """vLLM's trainer-side transfer engine."""

    def send_weights(self) -> None:
        """Send what the source gives now."""
        ...

    def shutdown(self) -> None:
        """Leave the transfer group."""
        ...


class EngineLink(Protocol):
    """The rollout engines as the sender drives them; vLLM's `VLLMWeightSyncClient` and what Troupe adds."""

    version: int
    """Version the engines serve after the next transfer."""

    @property
    def processes(self) -> int:
        """Engine processes that take part."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM."""
        ...

    def start_weight_update(self) -> None:
        """See vLLM."""
        ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See vLLM."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See vLLM."""
        ...


class PolicyWorker(TrainingRank):
    """One rank of the policy's training group."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(name, config.device, config.model.path, config.seed, config.trainer.threads)
        self._config = config
        self._reference: CausalLogprobs | None = None
        self._publisher: WeightPublisher | None = None
        self._sender: Sender | None = None
        self._link: EngineLink | None = None
        self._held: list[tuple[TokenBatch, torch.Tensor]] = []

    def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """Join the group and load the models. Raises OSError for a missing model."""
        self.join(rendezvous)
        return self.build()

    def build(self) -> WorkerHealth:
        """Load the models and put the policy under DeepSpeed, in a process that has joined its group."""
        config = self._config
        model = load_causal(config.model)
        module = self._logprobs(model, entropy_grad=config.loss.entropy_coef > 0)
        self._engine = TrainEngine(module, model, config.trainer, config.total_updates, config.device, model.dtype)
        if config.reference_model is not None:
            reference = self._logprobs(load_causal(config.reference_model), entropy_grad=False)
            self._reference = reference.requires_grad_(False).to(self._engine.device)
        return self.health()

    def compute_logprobs(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[int, pa.Table]:
        """(rows, token_scores table): `old_logprobs` of the plan's rows under the policy as it stands."""
        return score_plan(self.engine.module, plan, rollouts, "old_logprobs", self.engine.device)

    def reference_logprobs(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[int, pa.Table]:
        """(rows, token_scores table): `ref_logprobs` of the plan's rows under the colocated reference.

        Raises RuntimeError where the worker has none.
        """
        if self._reference is None:
            raise RuntimeError(f"{self._name} has no colocated reference")
        return score_plan(self._reference, plan, rollouts, "ref_logprobs", self.engine.device)

    def shares_prompts(self) -> bool:
        """Whether the samples of a group may be trained behind one copy of their prompt: asked for, and exact with this
        model. Collective."""
        return self._config.share_prompts and shares_prompts(cast(CausalLogprobs, self.engine.module))

    def prepare(self, request: PrepareRequest, *tables: pa.Table) -> tuple[TrainSummary, pa.Table]:
        """See `workers.prepare.prepare`; not collective, one rank does it for all."""
        return prepare(self._config.advantage, request, tables)

    def cut_texts(self, texts: pa.Table, max_tokens: int) -> tuple[TextSummary, pa.Table]:
        """See `workers.texts.cut_texts`; not collective, one rank does it for all."""
        from transformers import AutoTokenizer

        model = self._config.model
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        return cut_texts(tokenizer, texts, max_tokens)

    def update(
        self, plan: RankPlan, batch: pa.Table, kl_old_coef: float = 0.0, texts: pa.Table | None = None
    ) -> UpdateMetrics:
        """One optimizer step on the plan's rows of a TRAIN table. Collective.

        `kl_old_coef`: weight of KL(old || new) in this update (PPO with a KL penalty).
        `texts`: TEXTS table that `plan.texts` counts in; their likelihood is learnt in the same step (PPO-ptx).
        """
        table = TokenTable(batch)
        outputs: list[LossOutput] = []
        text_losses: list[torch.Tensor] = []

        # A micro-batch is cut when its turn comes: what an update holds does not grow with their number.
        def of_rollouts(rows: Sequence[int], forward: Forward) -> torch.Tensor:
            micro_batch = table.cut(rows, plan.shared).to(self.engine.device)
            output = self._loss(forward, micro_batch, table, plan, kl_old_coef)
            outputs.append(output.statistics())
            return output.loss

        def of_texts(part: TokenBatch, forward: Forward) -> torch.Tensor:
            micro_batch = part.to(self.engine.device)
            loss = self._text_loss(forward, micro_batch, plan.texts.total_loss_tokens if plan.texts is not None else 0)
            text_losses.append(loss.detach())
            return self._config.ptx_coef * loss

        # Without a row that has anything to teach, the texts still have.
        work = [partial(of_rollouts, rows) for rows in plan.micro_batches or ((),)]
        if texts is not None and plan.texts is not None:
            work += [partial(of_texts, part) for part in text_batches(texts, plan.texts)]
        step = self.engine.update(work, lambda forward, loss: loss(forward))
        metrics = update_metrics(step, outputs, self._device, sum(map(len, plan.micro_batches)))
        return _with_texts(metrics, text_losses, self._config.ptx_coef) if text_losses else metrics

    def hold_distributions(self, plan: RankPlan, batch: pa.Table, stride: int) -> None:
        """Remember what the policy as it stands makes of the plan's rows: every `stride`-th state of each micro-batch.

        Collective. Memory: states times vocabulary times 4 bytes.
        """
        parts = TokenTable(batch).batches(plan.micro_batches, plan.shared)
        batches = [_every(stride, part).to(self.engine.device) for part in parts]
        self._held = [(part, self._distributions(part)) for part in batches]

    def divergence(self) -> tuple[float, int]:
        """(sum over the states held, their number) of KL(then || now) in nats, exact over the vocabulary. Collective.

        What was held is let go.
        """
        held, self._held = self._held, []
        total = sum(float(exact_kl(old, self._distributions(part)).double().sum()) for part, old in held)
        return total, sum(len(part.positions) for part, _ in held)

    def publish_weights(self, version: int) -> WeightUpdate | None:
        """Write the weights to shared memory as `version`. Collective; only rank 0 has a result."""
        self._version = version
        return self._weight_publisher().publish(version)

    def read_weights(self, update: WeightUpdate) -> tuple[int, npt.NDArray[np.uint8]]:
        """(bytes, uint8 payload) of a published version, for engines on other nodes."""
        return update.nbytes, read_payload(update)

    def connect_engines(self, link: EngineLink) -> None:
        """Join the rollout engines for transfers from GPU to GPU (nccl, ipc). Collective. Untried on a GPU."""
        from workers.weight_transfer import IterableSource, ipc_sender, nccl_sender

        if self._sender is not None:
            self._sender.shutdown()
        self._link = link
        source = IterableSource(self.engine.named_weights, self.engine.weight_shapes())
        if self._config.transfer_backend == "ipc":
            self._sender = ipc_sender(source, link, self.engine.rank)
        else:
            address, port = own_address(), free_port()
            self._sender = nccl_sender(source, link, self.engine.rank, address, port, 1 + link.processes)

    def send_weights(self, version: int) -> int:
        """Send the weights to the connected engines as `version`; returns bytes sent. Collective."""
        if self._sender is None or self._link is None:
            raise RuntimeError(f"{self._name} is not connected to any engine")
        self._version = self._link.version = version
        self._sender.send_weights()
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.engine.weight_shapes())

    def release(self) -> None:
        """Let go of the models and the engines, and remove what was published."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None
        self._reference = None
        self._held = []
        super().release()

    def _weight_publisher(self) -> WeightPublisher:
        if self._publisher is None:
            # Under ZeRO-3 every rank takes part in gathering a tensor; rank 0 alone writes.
            self._publisher = WeightPublisher(
                self.engine.named_weights,
                shared_directory(),
                self._config.run_id,
                writes=self.engine.rank == 0,
                lasting=not self.engine.gathers,
            )
        return self._publisher

    def _logprobs(self, model: Any, entropy_grad: bool) -> CausalLogprobs:
        chunks = head_chunks(model.config.get_text_config().vocab_size, self._config.trainer.micro_batch_tokens)
        return CausalLogprobs(model, self._config.sampling.temperature, chunks, entropy_grad)

    def _distributions(self, batch: TokenBatch) -> torch.Tensor:
        module = cast(CausalLogprobs, self.engine.module)
        training = module.training
        module.eval()
        found = module.distributions(batch.input_ids, batch.attention_mask, batch.positions, batch.position_ids)
        module.train(training)
        return found

    @staticmethod
    def _text_loss(forward: Forward, batch: TokenBatch, total_tokens: int) -> torch.Tensor:
        """This micro-batch's share of the texts' mean negative log-likelihood per token, at temperature 1."""
        logprobs, _ = forward(batch.input_ids, batch.attention_mask, batch.positions, batch.targets, temperature=1.0)
        return -logprobs.sum() / max(total_tokens, 1)

    def _loss(
        self,
        forward: Forward,
        micro_batch: TokenBatch,
        table: TokenTable,
        plan: RankPlan,
        kl_old_coef: float,
    ) -> LossOutput:
        logprobs, entropy = forward(
            micro_batch.input_ids,
            micro_batch.attention_mask,
            micro_batch.positions,
            micro_batch.targets,
            micro_batch.position_ids,
        )
        rollout_logprobs = table.floats("rollout_logprobs", micro_batch)
        advantages = table.floats("advantages", micro_batch)
        if rollout_logprobs is None or advantages is None:
            raise ValueError("a batch for the policy needs rollout_logprobs and advantages")
        tokens = PolicyTokens(
            logprobs=logprobs,
            entropy=entropy,
            rollout_logprobs=rollout_logprobs,
            advantages=advantages,
            weights=token_weights(
                micro_batch.loss_mask,
                micro_batch.sequence,
                self._config.loss.aggregation,
                plan.total_loss_tokens,
                plan.total_sequences,
                self._config.sampling.max_tokens,
            ),
            loss_mask=micro_batch.loss_mask,
            sequence=micro_batch.sequence,
            old_logprobs=table.floats("old_logprobs", micro_batch),
            ref_logprobs=table.floats("ref_logprobs", micro_batch),
        )
        return policy_loss(tokens, self._config.loss, kl_old_coef)


def _with_texts(metrics: UpdateMetrics, losses: Sequence[torch.Tensor], coef: float) -> UpdateMetrics:
    """`ptx_loss`, and `loss` with it."""
    texts = sum(float(loss) for loss in losses)
    return replace(metrics, sums=metrics.sums | {"ptx_loss": texts, "loss": metrics.sums["loss"] + coef * texts})


def _every(stride: int, batch: TokenBatch) -> TokenBatch:
    """The batch with every `stride`-th of its states that the policy sampled a token in."""
    chosen = batch.loss_mask.nonzero().flatten()[::stride]
    return replace(batch, positions=batch.positions[chosen])

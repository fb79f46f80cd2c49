"""The policy: log-probs of what was sampled, updates, and weights for the rollout engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from workers.config import PolicyConfig, Rendezvous
from workers.deepspeed_engine import TrainEngine
from workers.losses import LossOutput, PolicyTokens, policy_loss, token_weights
from workers.messages import PrepareRequest, RankPlan, TrainSummary, UpdateMetrics, WeightUpdate, WorkerHealth
from workers.modeling import CausalLogprobs, head_chunks, load_causal, score_plan
from workers.prepare import prepare
from workers.rank import TrainingRank, free_port, own_address, update_metrics
from workers.tensors import TokenBatch, TokenTable
from workers.weight_file import WeightPublisher, read_payload, shared_directory


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

    def prepare(self, request: PrepareRequest, *tables: pa.Table) -> tuple[TrainSummary, pa.Table]:
        """See `workers.prepare.prepare`; not collective, one rank does it for all."""
        return prepare(self._config.advantage, request, tables)

    def update(self, plan: RankPlan, batch: pa.Table, kl_old_coef: float = 0.0) -> UpdateMetrics:
        """One optimizer step on the plan's rows of a TRAIN table. Collective.

        `kl_old_coef`: weight of KL(old || new) in this update (PPO with a KL penalty).
        """
        table = TokenTable(batch)
        outputs: list[LossOutput] = []

        def loss_fn(forward: Callable[..., Any], micro_batch: TokenBatch) -> torch.Tensor:
            outputs.append(self._loss(forward, micro_batch.to(self.engine.device), table, plan, kl_old_coef))
            return outputs[-1].loss

        step = self.engine.update(list(table.batches(plan.micro_batches)), loss_fn)
        return update_metrics(step, outputs, self._device, sum(map(len, plan.micro_batches)))

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
        super().release()

    def _weight_publisher(self) -> WeightPublisher:
        if self._publisher is None:
            # Under ZeRO-3 every rank takes part in gathering a tensor; rank 0 alone writes.
            self._publisher = WeightPublisher(
                self.engine.named_weights, shared_directory(), self._config.run_id, writes=self.engine.rank == 0
            )
        return self._publisher

    def _logprobs(self, model: Any, entropy_grad: bool) -> CausalLogprobs:
        chunks = head_chunks(model.config.get_text_config().vocab_size, self._config.trainer.micro_batch_tokens)
        return CausalLogprobs(model, self._config.sampling.temperature, chunks, entropy_grad)

    def _loss(
        self,
        forward: Callable[..., Any],
        micro_batch: TokenBatch,
        table: TokenTable,
        plan: RankPlan,
        kl_old_coef: float,
    ) -> LossOutput:
        logprobs, entropy = forward(
            micro_batch.input_ids, micro_batch.attention_mask, micro_batch.positions, micro_batch.targets
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

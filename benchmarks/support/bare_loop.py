"""Training-step baseline: a GRPO loop in one process with vLLM and torch, without orchestration.

It is written as an experienced user would write it: bfloat16 weights with float32 master weights and gradient sums,
micro-batches sorted by length, logits on response tokens only, one fused AdamW, weights passed to vLLM through shared
memory. On the CPU it uses the same library of matrix products as the product. The maths is the product's GRPO with one
update per step. A second trainer uses all kernels of the product.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.support.bare_engines import engine_arguments, generate_all
from benchmarks.support.train_rows import train_row
from benchmarks.support.workload import TASKS, Group, TaskName
from troupe.orchestrator.training.micro_batches import cut_micro_batches, plan_update
from troupe.workers.contract.config import PolicyConfig, RolloutConfig
from troupe.workers.contract.messages import TRAIN, TrainRow
from troupe.workers.engine.process import engine_processes
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.cpu import use_onednn
from troupe.workers.models.modeling import CausalLogprobs, head_chunks, load_causal
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import RequestOutput

_EXTENSION = "benchmarks.support.bare_loop_extension.ReloadExtension"
_KERNEL_EXTENSION = "benchmarks.support.kernel_extension.KernelExtension"


@dataclass(frozen=True)
class SampledSequence:
    """One sampled sequence."""

    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]


@dataclass(frozen=True)
class BareStep:
    """The measurements of one step."""

    wall_s: float
    phases: dict[str, float]
    """Seconds by phase."""
    tokens: int
    """Number of response tokens."""
    figures: dict[str, float] = field(default_factory=dict)
    response_ids: list[list[int]] = field(default_factory=list)


class BareTrainer:
    """A causal language model trained with mixed-precision AdamW."""

    def __init__(self, config: PolicyConfig) -> None:
        trainer = config.trainer
        torch.set_num_threads(trainer.threads)
        self._config = config
        self.model = self._load(config)
        self._device = torch.device(config.device)
        self.model.to(self._device)  # pyright: ignore[reportArgumentType] (its stubs know nn.Module's by another name)
        self.model.train()
        self._masters = [weight.detach().to(torch.float32, copy=True) for weight in self.model.parameters()]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=trainer.learning_rate,
            betas=trainer.adam_betas,
            eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def update(self, batch: Sequence[SampledSequence], advantages: torch.Tensor) -> dict[str, float]:
        """Run one optimizer step on the batch.

        Args:
            batch: The sampled sequences.
            advantages: float [sequences].

        Returns:
            `loss`, `grad_norm`, and `rollout_logprob_gap` in nats per token.
        """
        metrics = self.add_gradients(batch, advantages)
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._config.trainer.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self._masters, strict=True):
                weight.copy_(master)
        for gradient in self.gradients():
            gradient.zero_()
        return metrics | {"grad_norm": float(norm)}

    def add_gradients(self, batch: Sequence[SampledSequence], advantages: torch.Tensor) -> dict[str, float]:
        """Add the gradient of the batch's loss to `gradients`; rows with zero advantage are skipped.

        Args:
            batch: The sampled sequences.
            advantages: float [sequences].

        Returns:
            `loss`, and `rollout_logprob_gap` in nats per token.
        """
        loss_sum, gap_sum = 0.0, 0.0
        trained = [row for row, advantage in enumerate(advantages.tolist()) if advantage]
        for loss, gap in self._losses(batch, advantages, trained):
            loss.backward()
            for weight, gradient in zip(self.model.parameters(), self.gradients(), strict=True):
                if weight.grad is not None:
                    gradient += weight.grad
                weight.grad = None
            loss_sum, gap_sum = loss_sum + float(loss.detach()), gap_sum + float(gap)
        tokens = sum(len(batch[row].response_ids) for row in trained)
        return {"loss": loss_sum, "rollout_logprob_gap": gap_sum / max(tokens, 1)}

    def gradients(self) -> list[torch.Tensor]:
        """The float32 gradient sums, one per parameter."""
        return [master.grad for master in self._masters if master.grad is not None]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the weights; tied weights appear once."""
        return ((name, weight.detach()) for name, weight in self.model.named_parameters())

    def _load(self, config: PolicyConfig) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
        use_onednn(cast(nn.Module, model))  # torch's slower products would hide the cost of orchestration
        return model

    def _losses(
        self, batch: Sequence[SampledSequence], advantages: torch.Tensor, trained: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(loss, sum of absolute differences to the sampler's log-probs) of each micro-batch of the `trained` rows."""
        lengths = [len(one.prompt_ids) + len(one.response_ids) for one in batch]
        total = sum(len(one.response_ids) for one in batch)
        for rows in cut_micro_batches(lengths, trained, self._config.trainer.micro_batch_tokens):
            own = [batch[row] for row in rows]
            logprobs = self._logprobs(own)
            yield self._loss(own, logprobs, advantages[list(rows)], total)

    def _logprobs(self, batch: Sequence[SampledSequence]) -> torch.Tensor:
        """Log-probs of the response tokens of a micro-batch."""
        rows = [torch.tensor(one.prompt_ids + one.response_ids) for one in batch]
        ids = pad_sequence(rows, batch_first=True).to(self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        prompts = torch.tensor([len(one.prompt_ids) for one in batch], device=self._device)
        place = torch.arange(ids.shape[1], device=self._device)[None, :]
        is_response = (place >= prompts[:, None]) & (place < lengths[:, None])
        hidden = self.model.base_model(
            input_ids=ids, attention_mask=(place < lengths[:, None]).long(), use_cache=False
        ).last_hidden_state
        head: Any = self.model.get_output_embeddings()
        logits = head(hidden[:, :-1][is_response[:, 1:]])
        logits = logits.float() / self._config.sampling.temperature
        return logits.gather(-1, ids[is_response][:, None])[:, 0] - logits.logsumexp(-1)

    def _loss(
        self, batch: Sequence[SampledSequence], logprobs: torch.Tensor, advantages: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch, divided by the `total` tokens of the batch.

        With one update per batch the ratio to the old policy is 1, so the gradient of the clipped objective is that of
        -advantage * ratio. Truncated importance sampling corrects for the sampler's different numerics.

        Returns:
            (loss, sum of absolute differences to the sampler's log-probs).
        """
        sampled = [value for one in batch for value in one.rollout_logprobs]
        rollout_logprobs = torch.tensor(sampled, device=self._device)
        responses = torch.tensor([len(one.response_ids) for one in batch], device=self._device)
        per_token = advantages.float().to(self._device).repeat_interleave(responses)
        old = logprobs.detach()
        importance = (old - rollout_logprobs).exp().clamp(max=self._config.loss.importance.cap)
        loss = -(importance * per_token * (logprobs - old).exp()).sum() / total
        return loss, (old - rollout_logprobs).abs().sum()


class KernelTrainer(BareTrainer):
    """A `BareTrainer` that computes log-probs as the product does: its kernels, packed rows, shared prompts.

    What the product's step takes longer than one with this trainer is the cost of orchestration.
    """

    def _load(self, config: PolicyConfig) -> PreTrainedModel:
        model = load_causal(config.model)
        chunks = head_chunks(model.config.get_text_config().vocab_size, config.trainer.worker_tokens, config.device)
        self._module = CausalLogprobs(model, config.sampling.temperature, chunks)
        self._packs = adapt(self._module, model, config.device, config.trainer.packing)
        return model

    def _losses(
        self, batch: Sequence[SampledSequence], advantages: torch.Tensor, trained: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        groups: dict[tuple[int, ...], int] = {}
        numbers = [groups.setdefault(tuple(one.prompt_ids), len(groups)) for one in batch]
        samples = [train_row(numbers[row], row, one.prompt_ids, one.response_ids) for row, one in enumerate(batch)]
        table = TokenTable(pa.Table.from_pylist(samples, schema=TRAIN))
        rows = [
            TrainRow(
                len(one.prompt_ids) + len(one.response_ids), len(one.response_ids), True, len(one.prompt_ids), group
            )
            for one, group in zip(batch, numbers, strict=True)
        ]
        (plan,) = plan_update(
            rows,
            trained,
            ranks=1,
            budget=self._config.trainer.micro_batch_tokens,
            skip_zero_advantage=False,
            packed=self._packs,
            share_prompts=self._packs and self._config.share_prompts,
        )
        total = sum(len(one.response_ids) for one in batch)
        for chosen in plan.micro_batches:
            part = table.cut(chosen, plan).to(self._device)
            logprobs, _ = self._module(batch=part)
            order = part.rows.tolist()
            yield self._loss([batch[row] for row in order], logprobs, advantages[order], total)


class BareLoop:
    """GRPO in one process: each step generates, scores, trains and loads the new weights into vLLM."""

    def __init__(self, rollout: RolloutConfig, policy: PolicyConfig, task: TaskName, kernels: bool = False) -> None:
        """`kernels`: use the product's kernels to sample and, with the `KernelTrainer`, to train."""
        arguments = engine_arguments(rollout)
        from transformers import AutoTokenizer
        from vllm import LLM

        self._sampler = RolloutWorker(rollout, "bare")
        self._reward = TASKS[task].reward
        with engine_processes(rollout.device):
            self._llm = LLM(**arguments, worker_extension_cls=_KERNEL_EXTENSION if kernels else _EXTENSION)
        self._tokenizer = AutoTokenizer.from_pretrained(rollout.model.path)
        self._trainer = KernelTrainer(policy) if kernels else BareTrainer(policy)
        self._handed_over = Path("/dev/shm") / f"troupe-bare-loop-{os.getpid()}.safetensors"

    def ready(self) -> None:
        """Answers when everything is loaded."""

    def step(self, groups: Sequence[Group]) -> BareStep:
        """Run one step on these prompts."""
        phases: dict[str, float] = {}
        began = time.monotonic()
        with _timed(phases, "generate"):
            batch = self._generate(groups)
        with _timed(phases, "prepare"):
            rewards = self._rewards(groups, batch)
            advantages = group_advantages(rewards)
        with _timed(phases, "update"):
            metrics = self._trainer.update(batch, advantages)
        with _timed(phases, "sync"):
            self._sync_weights()
        wall_s = time.monotonic() - began
        metrics["reward"] = float(rewards.mean())
        ids = [one.response_ids for one in batch]
        return BareStep(wall_s, phases, sum(map(len, ids)), metrics, ids)

    def _generate(self, groups: Sequence[Group]) -> list[SampledSequence]:
        outputs = generate_all(self._llm, self._sampler, groups)
        prompts = [list(group.prompt_ids) for group in groups for _ in range(group.samples)]
        return [_sequence(ids, output) for ids, output in zip(prompts, outputs, strict=True)]

    def _rewards(self, groups: Sequence[Group], batch: Sequence[SampledSequence]) -> torch.Tensor:
        texts = self._tokenizer.batch_decode([one.response_ids for one in batch], skip_special_tokens=True)
        answers = [group.answer for group in groups for _ in range(group.samples)]
        rewards = [self._reward(text, answer) for text, answer in zip(texts, answers, strict=True)]
        return torch.tensor(rewards, dtype=torch.double).view(len(groups), -1)

    def _sync_weights(self) -> None:
        from safetensors.torch import save_file

        save_file(dict(self._trainer.named_weights()), self._handed_over)
        try:
            self._llm.collective_rpc("reload_from", args=(str(self._handed_over),))
            self._llm.reset_prefix_cache()
        finally:
            self._handed_over.unlink()


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards centred and scaled within each group.

    Args:
        rewards: float [groups, samples].

    Returns:
        float [groups * samples].
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def _sequence(prompt_ids: list[int], output: RequestOutput) -> SampledSequence:
    completion = output.outputs[0]
    flat: Any = completion.logprobs
    return SampledSequence(
        prompt_ids, list(completion.token_ids), [flat.logprobs[start] for start in flat.start_indices]
    )


@contextlib.contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    phases[name] = time.monotonic() - began

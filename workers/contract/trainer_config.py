"""Configuration of a training group: optimizer, batches, sharding, adapters."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import Consequences, Resume, noted


class OptimizerConfig(Frozen):
    """AdamW and its learning-rate schedule."""

    consequences: ClassVar = noted("from the next update on")
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay; biases and norm weights are not decayed."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """Added to the denominator of the update."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. `linear` and `cosine` decay to `min_lr_ratio` of the peak at the last update."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final learning rate of `linear` and `cosine` as a fraction of the peak."""


_NO_AVERAGE = Consequences(resume=Resume(refused_if_off="the checkpoint has no moving average of the weights"))


EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Types of models whose experts can be divided among the workers (`expert_parallel_size`)."""


class TrainerConfig(OptimizerConfig):
    """One DeepSpeed training group (policy or critic)."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ZeRO partitions over the workers. 0: nothing; 1: optimizer states; 2: also gradients; 3: also parameters. A
    single worker has nothing to partition: in float32 it treats 1 and 2 as 0."""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory (GPU only, requires ZeRO)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more compute."""
    recompute_every: int = Field(default=1, ge=1)
    """With `gradient_checkpointing`, recompute every n-th layer, and keep what the others computed. 1: all layers."""
    recompute_products: bool = True
    """With `gradient_checkpointing`, also recompute a layer's matrix products and attention. False: keep their results,
    and recompute norms, rotary positions and activation functions: less memory is saved, for hardly more compute."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Maximum number of tokens, padding included, in one forward pass of one worker, or of the workers that share it
    (`sequence_parallel_size`)."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Workers that share each micro-batch: every one runs the model on a part of the tokens and, in attention, on all
    of them with a part of the heads (Ulysses). Activations are divided by it, for contexts that one worker cannot hold.
    It must divide `workers` and the model's attention heads, and needs `packing`. 1: no worker shares a micro-batch."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Adjacent workers that divide the experts of each layer among them: every one holds and trains an equal part, and
    tokens travel to their experts and back (all-to-all). For Qwen2-MoE, Qwen3-MoE and Mixtral; needs `zero_stage` 3. It
    must divide `workers` and the model's experts. 1: every worker runs all experts."""
    packing: bool = True
    """Concatenate the sequences of a micro-batch into one row, without padding, if the model takes that; the result
    is the same to float tolerance. False: pad them to one length."""
    kernels: Literal["torch", "liger"] = "torch"
    """Kernels of norms, rotary positions and gated MLPs. `liger` (GPU only): the kernels of the package liger-kernel,
    which use less memory; at the start they are compared with the model's own."""
    threads: int = Field(default=0, ge=0)
    """Compute threads (CPU only). 0: as many as the role's `cpus`, at least one."""
    ema_decay: Annotated[float, _NO_AVERAGE] = Field(default=0.0, ge=0.0, lt=1.0)
    """Keep an exponential moving average of the weights: after every update, average = ema_decay * average +
    (1 - ema_decay) * weights. Every checkpoint stores it as a second model (`troupe export --average`). 0: off."""

    @property
    def worker_tokens(self) -> int:
        """Maximum number of tokens of a micro-batch that one worker runs the model on."""
        return -(-self.micro_batch_tokens // self.sequence_parallel_size)

    def recomputed(self, layers: int) -> int:
        """Layers whose activations are recomputed, of so many."""
        return -(-layers // self.recompute_every) if self.gradient_checkpointing else 0

    def stage_for(self, ranks: int, float32: bool) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage to use for a group of so many ranks. For a single rank in float32, ZeRO stages 1 and 2 would
        copy all gradients and keep all weights twice, for no gain. In bfloat16 and float16 they accumulate gradients in
        float32."""
        alone = ranks == 1 and float32 and not self.offload_optimizer
        return 0 if alone and self.zero_stage < 3 else self.zero_stage


ALL_LINEAR = "all-linear"
"""`lora.targets` of every linear layer but the output head."""


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves memory for; a rank in between takes the memory of the next one."""


class LoraConfig(Frozen):
    """Low-rank adapters (LoRA, arXiv 2106.09685): only they train, and the model itself stays as it was loaded.

    A target's weight W becomes W + scaling * B A, where A has `rank` rows and starts at random, and B has `rank`
    columns and starts at 0."""

    rank: int = Field(default=16, ge=1, le=ADAPTER_RANKS[-1])
    """Rank of the adapters (peft's `r`)."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Numerator of the scaling, alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEAR
    """Layers that have an adapter, by the last part of their name, such as `[q_proj, v_proj]`; `all-linear`: every
    linear layer but the output head. In a model with experts, name layers outside of their blocks."""
    rslora: bool = False
    """Divide alpha by the square root of the rank instead of the rank (rsLoRA, arXiv 2312.03732)."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def reserved_rank(self) -> int:
        """Rank that an engine reserves memory for."""
        return next(rank for rank in ADAPTER_RANKS if rank >= self.rank)

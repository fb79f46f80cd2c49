"""What a worker is told: frozen, validated, and the same classes the spec is made of.

The spec (``orchestrator/spec.py``) embeds these models where a section passes to a worker unchanged, so every
field is described and checked in one place only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

CPU_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of a process that computes on the CPU. A thread that waits for the others of its process sleeps: by
default it spins, and takes from the workers that share its cores the time they need to let it go on."""

Dtype = Literal["bfloat16", "float32"]
TransferBackend = Literal["shm", "ipc", "nccl"]

CHUNK_LOGITS = 2**24
"""Most logits held at once by the output head, 64 MiB in float32: as fast as any more, and the rest is recomputed."""

REDUCE_BUCKET = 500_000_000
"""Numbers whose gradients DeepSpeed reduces together, at most. On a GPU they are reserved at once."""


class Frozen(BaseModel):
    """Base of every configuration model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ModelConfig(Frozen):
    """Which pretrained model a role starts from."""

    path: str
    """Folder with a Hugging Face model (config, safetensors, tokenizer)."""
    dtype: Dtype = "bfloat16"
    """Type the weights are held and multiplied in."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave it off unless you wrote that code."""


class SamplingConfig(Frozen):
    """How the policy is sampled for training. Truncated sampling (top-p, top-k) is left to evaluation:
    it would make the sampled distribution differ from the one that is trained."""

    temperature: float = Field(default=1.0, gt=0.0)
    """Softmax temperature. The trainer divides its logits by the same number."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens; longer ones are cut and marked `length`."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's end-of-sequence token."""


class EvalSampling(Frozen):
    """How the policy is sampled for evaluation."""

    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: keep the smallest set of tokens with this much probability."""
    samples: int = Field(default=1, ge=1)
    """Samples per prompt; with more than one, pass@k is reported for k up to this number."""


class EngineConfig(Frozen):
    """One vLLM engine."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs (or CPU ranks) that share one copy of the model."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    max_model_len: int = Field(default=1024, ge=8)
    """Longest prompt plus response, in tokens."""
    enforce_eager: bool = False
    """Skip compilation: starts sooner, decodes slower on GPUs."""
    enable_prefix_caching: bool = True
    """Share the KV cache of common prefixes (the samples of one group share their prompt)."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0.0, le=1.0)
    """Share of a GPU's memory the engine may take (GPU only)."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """KV cache size in GiB (CPU only; on a GPU it follows from `gpu_memory_utilization`)."""
    threads: int = Field(default=0, ge=0)
    """Compute threads (CPU only). 0: as many as the role's `cpus`, at least one."""


class OptimizerConfig(Frozen):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay (biases and norm weights are left out)."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """Added to the denominator."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, down to `min_lr_ratio` at the last update."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the rate rises linearly from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """The schedule ends at this share of the peak rate."""


class TrainerConfig(OptimizerConfig):
    """One DeepSpeed training group (policy or critic)."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ZeRO partitions over the workers: nothing, optimizer, gradients too, parameters too. (One worker alone has
    nothing to partition: in float32 it takes 1 and 2 as 0.)"""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory (GPU only, and with ZeRO)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more work."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens (padding included) in one forward pass of one worker."""
    threads: int = Field(default=0, ge=0)
    """Compute threads (CPU only). 0: as many as the role's `cpus`, at least one."""
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Keep a moving average of the weights as well: after every update, average = ema_decay * average +
    (1 - ema_decay) * weights. Every checkpoint then holds it as a second model (`troupe export --average`). 0: none."""

    def stage_for(self, ranks: int, float32: bool) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage of a group of so many ranks, for weights in float32 or not.

        For one rank stages 1 and 2 would copy all gradients and keep all weights twice, for nothing. In bfloat16 they
        are what adds gradients up in float32.
        """
        alone = ranks == 1 and float32 and not self.offload_optimizer
        return 0 if alone and self.zero_stage < 3 else self.zero_stage


REWARD_FUNCTIONS = (
    "exact_match",
    "last_number",
    "numeric",
    "regex",
    "length",
    "overlong",
    "reasoning_gym",
    "letter_share",
    "equations",
)
"""Names of the shipped reward functions (`workers/rewards/` has one function for each)."""

STEP_FUNCTIONS = ("letter_share", "equations")
"""Those that can give process rewards."""


class RewardFunctionConfig(Frozen):
    """One reward component."""

    name: str = Field(min_length=1)
    """A shipped function (exact_match, numeric, regex, length, reasoning_gym, equations, ...) or
    `package.module:function`."""
    weight: float = 1.0
    """The sample's reward is the weighted sum of its components."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """A call that takes longer is a failed sample, never a number."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    label: str = ""
    """Name in the metrics; the function's own name where empty."""
    process: bool = False
    """The function returns steps, and each is rewarded where it ends (process supervision, GRPO and its kin); a number
    is a failed sample. Else one number counts for the whole response: of a function that returns steps, their outcome
    (the mean, where it names none)."""


class RewardConfig(Frozen):
    """What a reward worker computes."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """Reward functions; several are added up by weight."""
    model: ModelConfig | None = None
    """A reward model (sequence classifier with one label); its score is the component `reward_model`."""
    model_weight: float = 1.0
    """Weight of the reward model's score."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens in one forward pass of the reward model."""
    memory_limit_mib: int = Field(default=2048, ge=64)
    """Most memory one reward function's process may add."""
    threads: int = Field(default=0, ge=0)
    """Compute threads of the reward model (CPU only). 0: as many as the role's `cpus`, at least one."""


class ImportanceConfig(Frozen):
    """Correction for the gap between the sampler and the trainer, w = exp(old_logprobs - rollout_logprobs).

    With it the objective is that of decoupled PPO (arXiv 2110.00641): `old_logprobs` are the proximal policy the ratio
    is clipped around, `rollout_logprobs` the behaviour policy that sampled."""

    mode: Literal["none", "truncate", "mask"] = "truncate"
    """`truncate`: min(w, cap) (truncated importance sampling); `mask`: drop what has w outside [1/cap, cap]."""
    level: Literal["token", "sequence"] = "token"
    """`token`: every token has its own w; `sequence`: the product over a response's tokens counts for all of them."""
    cap: float = Field(default=2.0, gt=1.0)
    """Bound on w."""


class PolicyLossConfig(Frozen):
    """The policy's loss on one micro-batch."""

    objective: Literal["clip", "policy_gradient", "cispo", "kl_penalty"] = "clip"
    """`clip`: PPO's clipped ratio (arXiv 1707.06347, eq. 7); `policy_gradient`: -advantage * log-prob (REINFORCE);
    `cispo`: the same, weighted by the clipped ratio without gradient (arXiv 2506.13585, eq. 4); `kl_penalty`:
    the ratio unclipped, and beta * KL(old || new) on top (arXiv 1707.06347, eq. 8)."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """What the ratio compares: a token's probability; the geometric mean over the response (GSPO, arXiv 2507.18071,
    eq. 7); or that mean with a token's own gradient (GSPO-token, eq. 14)."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high."""
    dynamic_clip: bool = False
    """Bounds that widen for improbable tokens, from `clip_low`, `clip_high` and the old probability (DCPO, arXiv
    2509.02333, sec. 3.1)."""
    max_ratio: float | None = Field(default=None, gt=1.0)
    """dynamic_clip: the upper bound is never above this."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Where the advantage is negative, the loss is at most -dual_clip * advantage (arXiv 1912.09729)."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL-to-reference term in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(pi || pi_ref) per token (Schulman, "Approximating KL divergence", 2020)."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "constant", "only_token_mean"] = "token_mean"
    """token_mean: every token of the mini-batch weighs the same; sequence_mean: every sequence does;
    constant: summed tokens over sequences times `max_tokens` (Dr. GRPO); only_token_mean: the sum of the sequences'
    means, divided by nothing (DCPO)."""
    importance: ImportanceConfig = ImportanceConfig()
    """Sampler-trainer correction."""


class CriticLossConfig(Frozen):
    """The critic's loss on one micro-batch."""

    value_clip: float | None = Field(default=0.2, gt=0.0)
    """New values are clipped to old values plus or minus this; none: plain squared error."""


STEP_ESTIMATORS = frozenset({"group"})
"""Estimators of the advantage that read process rewards; the others take one reward for a response."""


class AdvantageConfig(Frozen):
    """How rewards become advantages (and, with a critic, returns)."""

    estimator: Literal["group", "smooth_group", "best_of_group", "returns", "gae", "n_step", "distill"]
    """`group`: reward against the other samples of the group (GRPO); `smooth_group`: against the prompt's earlier
    visits too (DCPO); `best_of_group`: the group's size for its best sample, 0 for the others (RAFT); `returns`: sums
    of token rewards less a baseline (REINFORCE and its kin); `gae`, `n_step`: temporal differences of the critic;
    `distill`: log-prob under the teacher less log-prob under the policy."""
    normalize_by_std: bool = True
    """Group estimator: divide by the group's standard deviation."""
    baseline: Literal["none", "running_mean", "group_mean", "leave_one_out", "greedy"] = "none"
    """returns: what is taken off a sample's return: nothing, the mean of all earlier batches, the mean of its group,
    the mean of the others of its group, or the reward of the greedy response to the same prompt."""
    reward_to_go: bool = True
    """returns: a token is credited with the rewards from it on; else with the whole response's."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token (returns, gae, n_step)."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Exponential weight of longer returns (gae)."""
    n_steps: int = Field(default=8, ge=1)
    """n_step: tokens whose rewards are summed before the critic's value stands in for the rest."""
    whiten: bool = False
    """returns, gae, n_step: advantages are shifted and scaled to mean 0, variance 1 over the batch's tokens."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """returns, gae, n_step: advantages are clipped to plus or minus this at the end."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """returns, gae, n_step: -kl_coef * (old_logprobs - ref_logprobs) is added to every token's reward."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """The coefficient is steered so that a response's KL divergence comes out at this (nats)."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples over which the steering takes effect (arXiv 1909.08593, sec. 2.2)."""
    reward_scale: Literal["none", "batch", "running"] = "none"
    """returns, gae, n_step: sequence rewards are shifted and scaled to mean 0, variance 1, over the batch or over
    all batches so far (PPO-max, arXiv 2307.04964)."""
    reward_clip: float | None = Field(default=None, gt=0.0)
    """returns, gae, n_step: the (scaled) sequence reward is clipped to plus or minus this."""


class RolloutConfig(Frozen):
    """Everything one rollout worker is told."""

    model: ModelConfig
    engine: EngineConfig
    sampling: SamplingConfig
    seed: int
    transfer_backend: TransferBackend
    device: Literal["cpu", "cuda"]


class PolicyConfig(Frozen):
    """Everything one policy rank is told."""

    model: ModelConfig
    trainer: TrainerConfig
    loss: PolicyLossConfig
    advantage: AdvantageConfig
    sampling: SamplingConfig
    run_id: str
    """Part of the name of the shared-memory weight file."""
    reference_model: ModelConfig | None
    """Load a frozen reference beside the policy (colocated)."""
    total_updates: int
    """Optimizer updates the learning-rate schedule spans."""
    seed: int
    device: Literal["cpu", "cuda"]
    transfer_backend: TransferBackend = "shm"
    ptx_coef: float = 0.0
    """Weight of the texts' negative log-likelihood (PPO-ptx)."""
    share_prompts: bool = False
    """Train the samples of a group behind one copy of their prompt, where the model can."""


class CriticConfig(Frozen):
    """Everything one critic rank is told."""

    model: ModelConfig
    trainer: TrainerConfig
    loss: CriticLossConfig
    total_updates: int
    seed: int
    device: Literal["cpu", "cuda"]


class ReferenceConfig(Frozen):
    """Everything one reference worker is told."""

    model: ModelConfig
    temperature: float
    micro_batch_tokens: int
    threads: int
    device: Literal["cpu", "cuda"]


class Rendezvous(Frozen):
    """Where and as whom a rank joins its training group."""

    address: str
    port: int
    rank: int
    world_size: int

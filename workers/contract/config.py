"""Worker configuration: frozen, validated models that the spec is also made of.

The spec (`orchestrator/spec/rollout.py`) embeds these models in the sections that are passed to a worker unchanged, so
that every field is described and checked in one place.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from troupe.workers.contract.consequences import (
    COUNTED,
    EVALUATED,
    EVALUATED_IF_SET,
    NOT_EVALUATED,
    NOT_REWARDED,
    OTHER_REWARDS,
    REWARDED,
    UNCOUNTED,
    Consequences,
    Counts,
    Resume,
    noted,
)
from troupe.workers.contract.rewards import COMBINATIONS, JUDGE_REWARD, REWARD_MODEL
from troupe.workers.contract.weight_backends import TransferBackend

CPU_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables of a process that computes on the CPU. With them, a waiting OpenMP thread sleeps. By default it
spins and takes CPU time from the workers that share its cores."""

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]
Sleep = Literal["none", "kv_cache", "weights"]
"""What an engine releases while the trainer on its GPU updates: nothing, its KV cache, or also its weights."""
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "only_token_mean"]

OWN_GPU_SHARE = 0.85
"""Fraction of a GPU's memory for an engine that has it to itself, by default."""
GPU_BATCH_TOKENS = 8192
"""Tokens of an engine's largest batch on a GPU (vLLM's `max_num_batched_tokens`), for which it reserves memory, unless
its sequences have fewer (`EngineConfig.gpu_batch_tokens`)."""
_CPU_BATCH_TOKENS = 4096
GPU_TILE_COLUMNS = 8192
"""Columns of the vocabulary for which the output head holds logits at a time on a GPU: enough for a matrix product to
fill it. Measured on an H200 with 16,384 tokens, a vocabulary of 152,064 and a hidden size of 3,584: 4,096 to 32,768
columns take the same time to 2 %."""
LOWEST_LOGIT = -1e30
"""Where the output head begins its search for the highest logit: below every logit, and finite: 0 times it is 0."""
CHUNK_LOGITS: dict[Device, int] = {"cpu": 2**24, "cuda": 2**26}
"""Maximum number of logits the output head holds at once: 64 and 256 MiB in float32. Larger chunks are not faster on
the CPU. On a GPU every chunk reads the head's weight and adds to its gradient: 1 GB each for a vocabulary of 152,000
and a hidden size of 3,584."""

DISTILL_CHUNKS = 4
"""Times as many chunks of the output head if its logits are compared with a teacher's: a divergence keeps about as many
tensors of their size."""
REDUCE_BUCKET = 500_000_000
"""Maximum number of gradient elements that DeepSpeed reduces together. On a GPU this buffer is allocated up front."""

MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature above 0 to this one, and the trainer would divide its logits by another number."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses a request with a higher one."""
MAX_TOP_K = 2**31 - 1
"""vLLM holds it in 32 bits."""


NO_TEMPLATE = "none"
"""`model.chat_template` of a model without one."""


class Frozen(BaseModel):
    """Base of every configuration model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    consequences: ClassVar[Consequences | None] = None
    """Consequences of the class's fields without their own."""


def first_problem(error: ValidationError) -> str:
    """The first of a validation's errors in one line, with the place of the field."""
    first = error.errors()[0]
    place, text = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def _sampled_as_configured(temperature: float) -> float:
    if 0.0 < temperature < MIN_TEMPERATURE:
        why = f"vLLM would sample at {MIN_TEMPERATURE}"
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {temperature}: {why}")
    return temperature


GreedyOrTemperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE), AfterValidator(_sampled_as_configured)]
"""Softmax temperature; 0: greedy."""


class ModelConfig(Frozen):
    """The pretrained model a role starts from."""

    consequences: ClassVar = COUNTED
    path: Annotated[str, Consequences(path="model")]
    """Folder with a Hugging Face model (config, safetensors, tokenizer), or its name on the hub (`org/name`)."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a model on the hub; null: main. A run is pinned to the commit. Folders have none."""
    adapter: Annotated[str | None, Consequences(path="path")] = Field(default=None, min_length=1)
    """Folder of an adapter (LoRA, peft's format) for the model, such as `troupe export` writes. Adapters that train
    (`lora`) start from it, with the same rank, alpha and targets. Elsewhere it is added to the weights when they are
    loaded, in float32 before rounding once."""
    dtype: Dtype = "bfloat16"
    """Data type of the weights and of matrix multiplications. float16 rounds a number less than bfloat16, 11 bits
    instead of 8, so that sampler and trainer agree more closely, but holds none above 65,504: its losses are scaled,
    and an update whose gradient overflows is skipped."""
    float32_head: bool = True
    """Compute logits in float32 from the 16-bit states and weights, in vLLM, in training and in scoring. This brings
    the log-probs of sampler and trainer nearer to each other. Without effect in float32. Values and scores of critics
    and reward models are always computed in float32."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. Leave it off unless you trust that code."""
    chat_template: Annotated[str | None, Consequences(path="template")] = Field(default=None, min_length=1)
    """Jinja file with the chat template to use instead of the tokenizer's, also in exports; `none`: no template,
    so that a prompt is the text as it stands, after what the tokenizer puts before a text (such as a BOS token); null:
    the tokenizer's own."""

    allow_special: bool = False
    """Whether the text of a special token (such as `<|im_end|>`) in data, in an answer of an environment or in the
    result of a tool becomes that token. False: it is text, so that nobody but the chat template opens or ends a turn.
    Set it for data that has the template's tokens in it."""

    @property
    def plain(self) -> bool:
        """Whether there is no chat template: prompts and responses are texts."""
        return self.chat_template == NO_TEMPLATE

    @property
    def computes_float32_logits(self) -> bool:
        """Whether the output head computes in a different type from the other layers."""
        return self.float32_head and self.dtype != "float32"


class StructuredConfig(Frozen):
    """A form that every response has: tokens that would leave it are not sampled (vLLM's structured outputs)."""

    consequences: ClassVar = COUNTED
    regex: str | None = Field(default=None, min_length=1)
    """A regular expression that the whole response matches."""
    choice: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The response is one of these texts."""
    json_schema: dict[str, Any] | None = None
    """The response is JSON that conforms to this schema."""
    grammar: str | None = Field(default=None, min_length=1)
    """A context-free grammar in EBNF that the response conforms to."""

    @model_validator(mode="after")
    def _has_one_form(self) -> StructuredConfig:
        if sum(value is not None for _, value in self) != 1:
            raise ValueError(f"set one of {', '.join(type(self).model_fields)}")
        return self


class SamplingConfig(Frozen):
    """Sampling for training. With `top_p`, `top_k` or `min_p`, the tokens left to each sampled token are recorded. The
    trainer's log-probs are among the same tokens, so that the trained policy is the sampling one."""

    temperature: Annotated[float, NOT_EVALUATED] = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Softmax temperature. The trainer divides its logits by the same value. vLLM has none between 0 and 0.01, or above
    2."""
    top_p: Annotated[float, NOT_EVALUATED] = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: sample from the smallest set of tokens with at least this total probability, after the
    temperature, min-p and top-k; 1: from all."""
    top_k: Annotated[int, NOT_EVALUATED] = Field(default=0, ge=0, le=MAX_TOP_K)
    """Sample from the k most probable tokens (more if probabilities are equal); 0: from all."""
    min_p: Annotated[float, NOT_EVALUATED] = Field(default=0.0, ge=0.0, lt=1.0)
    """Sample from the tokens whose probability is at least this share of the most probable one's; 0: from all."""
    max_tokens: Annotated[int, EVALUATED] = Field(default=256, ge=1)
    """Longest response, in tokens; longer ones are truncated, with the finish reason `length`."""
    stop: Annotated[tuple[str, ...], EVALUATED_IF_SET] = ()
    """Strings that end a response, besides the model's ends of a turn; special tokens in them match. The response
    includes them: they are scored and trained."""
    structured: Annotated[StructuredConfig | None, EVALUATED_IF_SET] = None
    """A form that every response (of an episode: every turn) has; null: any text. Log-probs of samples are then those
    among the permitted tokens, and the importance weight of a token is the probability that the policy gives to all
    permitted ones. With `top_p`, `top_k` or `min_p` the form is part of the recorded tokens."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled, besides the ones that a form forbids."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class EvalSampling(Frozen):
    """Sampling for evaluation."""

    temperature: GreedyOrTemperature = 0.0
    """0 is greedy decoding. vLLM has no temperature between 0 and 0.01, or above 2."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: sample from the smallest set of tokens with at least this total probability."""
    top_k: int = Field(default=0, ge=0, le=MAX_TOP_K)
    """Sample from the k most probable tokens; 0: from all."""
    min_p: Annotated[float, EVALUATED_IF_SET] = Field(default=0.0, ge=0.0, lt=1.0)
    """Sample from the tokens whose probability is at least this share of the most probable one's; 0: from all."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | None, EVALUATED_IF_SET] = None
    """Strings that end a response, which includes them, besides the model's ends of a turn; null: `sampling.stop`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest response, in tokens; null: `sampling.max_tokens`."""
    samples: int = Field(default=1, ge=1)
    """Samples per prompt; with more than one, pass@k is reported for k up to this number, and the vote of all of them
    (maj@k), if the reward defines which samples are solved (`solved_at`), else the best reward of k (best@k)."""


class EngineConfig(Frozen):
    """One vLLM engine."""

    consequences: ClassVar = UNCOUNTED
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs (or CPU ranks) that share one copy of the model."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum number of sequences decoded together."""
    max_model_len: int = Field(default=1024, ge=8)
    """Longest prompt plus response, in tokens."""
    enforce_eager: bool = False
    """Skip compilation: the engine starts sooner and decodes slower on GPUs."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of common prefixes (the samples of one group share their prompt)."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of the GPU's memory that the engine may use (GPU only). null: 0.85; on the policy's GPU
    (`colocate_with: policy`) what the policy leaves it, less a tenth of the GPU if possible."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """KV cache size in GiB (CPU only; on a GPU it follows from `gpu_memory_utilization`)."""
    threads: int = Field(default=0, ge=0)
    """Compute threads (CPU only). 0: as many as the role's `cpus`, at least one."""

    @property
    def gpu_share(self) -> float:
        """`gpu_memory_utilization`, null resolved for an engine with a GPU to itself."""
        return OWN_GPU_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    @property
    def gpu_batch_tokens(self) -> int:
        """Tokens of the largest batch on a GPU. vLLM divides a trial batch of this size among all sequences, and one
        longer than `max_model_len` reads memory beyond its block table, which ends the engine."""
        return max(self.max_num_seqs, min(GPU_BATCH_TOKENS, self.max_num_seqs * self.max_model_len))

    @property
    def cpu_batch_tokens(self) -> int:
        """Tokens of the largest batch on the CPU, which computes each prompt at once; at least one per sequence."""
        return max(self.max_num_seqs, self.max_model_len, _CPU_BATCH_TOKENS)


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
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Maximum number of tokens, padding included, in one forward pass of one worker, or of the workers that share it
    (`sequence_parallel_size`)."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Workers that share each micro-batch: every one runs the model on a part of the tokens and, in attention, on all
    of them with a part of the heads (Ulysses). Activations are divided by it, for contexts that one worker cannot hold.
    It must divide `workers` and the model's attention heads, and needs `packing`. 1: no worker shares a micro-batch."""
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


_TIMEOUT = Consequences(evaluation=Counts.AT_DEFAULT, reward=Counts.NO)


class RewardFunctionConfig(Frozen):
    """One reward component."""

    name: Annotated[str, COUNTED] = Field(min_length=1)
    """A built-in function (exact_match, numeric, regex, length, reasoning_gym, equations, python_tests,
    judge, ...), `reward_model`, a combination of other components (product, gate, min, max, mean, mean_minus_variance,
    mean_minus_std) or `package.module:function`."""
    weight: Annotated[float, COUNTED] = 1.0
    """The sample's reward is the weighted sum of its components."""
    timeout_s: Annotated[float, _TIMEOUT] = Field(default=5.0, gt=0.0)
    """A call that takes longer makes the sample fail; it never becomes a reward. For `judge`: the time in which all
    samples of a group are judged."""
    batched: Annotated[bool, EVALUATED, NOT_REWARDED] = False
    """True: the function is called once for a group, with lists of responses, answers and metadata, and returns a list
    with one result per response; None in it fails that sample. False: it is called for each response, and for all of
    them at the same time if it is asynchronous."""
    args: Annotated[dict[str, Any], COUNTED] = Field(default_factory=dict)
    """Keyword arguments of the function. Of `reward_model`: `model`, its name in `roles.reward.models`. Of a
    combination: `of`, the labels of its components, and `coef`, the weight of the variance or the standard deviation
    (1.0)."""
    label: Annotated[str, COUNTED] = ""
    """Name in the metrics; if empty, the name of the reward model, or the function's own name."""
    env: Annotated[tuple[str, ...], EVALUATED, NOT_REWARDED] = ()
    """Environment variables with secrets (`..._TOKEN`, `PASSWORD`, URLs with a password, ...) that the function may
    read; it gets none but these."""
    process: Annotated[bool, COUNTED] = False
    """True: the function returns steps, and each is rewarded at its end (process supervision); a function that returns
    a number makes the sample fail. False: one number counts for the whole response; for a function that returns steps
    it is their outcome (by default their mean)."""
    normalize: Annotated[bool, UNCOUNTED] = False
    """Train on the component's values minus their mean, divided by their standard deviation, over the samples of all
    steps so far (`algorithm.by_source`: of the source). Metrics, samples and evaluations have the values themselves."""

    @property
    def component(self) -> str:
        """Name of the component: the label, or the name of the reward model or the function."""
        return self.label or self.model or self.name.rpartition(":")[2]

    @property
    def model(self) -> str:
        """Name of the reward model that gives the component, or empty."""
        return str(self.args.get("model", REWARD_MODEL)) if self.name == REWARD_MODEL else ""

    @property
    def of(self) -> tuple[str, ...]:
        """Labels of the components that it combines, or empty if it is no combination."""
        return tuple(map(str, self.args.get("of", ()))) if self.name in COMBINATIONS else ()

    @property
    def compares(self) -> str:
        """What a judge compares (`compare` of its arguments), or empty."""
        return str(self.args.get("compare", "")) if self.name == JUDGE_REWARD else ""


class ModelArgs(Frozen):
    """Arguments of the component `reward_model`."""

    model: str = REWARD_MODEL
    """Name of the model in `roles.reward.models`; by default `roles.reward.model`."""


class CombinationArgs(Frozen):
    """Arguments of a component that combines others."""

    of: tuple[str, ...] = Field(min_length=2)
    """Their labels."""
    coef: float = Field(default=1.0, ge=0.0)
    """Weight of the variance or the standard deviation."""


_IF_SET = Consequences(evaluation=Counts.IF_SET, reward=Counts.IF_SET)
_REWARD_MODEL = Consequences(
    of={"path": REWARDED, "revision": REWARDED, "adapter": REWARDED}
    | {"level": _IF_SET, "separator": _IF_SET, "offset": _IF_SET}
)


ScoreLevel = Literal["response", "token_mean", "min", "mean", "last", "step"]
"""What a reward model scores, and how the scores of steps become rewards."""


class RewardModelConfig(ModelConfig):
    """A reward model: a sequence classifier with one label."""

    level: ScoreLevel = "response"
    """What the model scores. `response`: the response, at its last token; `token_mean`: every token of the response,
    whose mean is the score. A process reward model also gives the chance that a step is right, where the step ends:
    `min`, `mean` and `last` make one reward of the steps', and `step` rewards each of them (process rewards)."""
    separator: str = Field(default="\n\n", min_length=1)
    """Text that ends each step but the last, as `separator` of the data on which the model was trained."""
    offset: float = 0.0
    """Subtracted from every score. With the mean score of reference answers, these score 0 on average (arXiv
    2203.02155, sec. 3.5)."""


class RewardConfig(Frozen):
    """The rewards that a reward worker computes."""

    functions: Annotated[tuple[RewardFunctionConfig, ...], OTHER_REWARDS] = ()
    """Reward functions; the reward is their weighted sum."""
    model: Annotated[RewardModelConfig | None, EVALUATED, NOT_REWARDED, OTHER_REWARDS, _REWARD_MODEL] = None
    """A reward model (a sequence classifier with one label); its score is the component `reward_model`, unless one of
    `functions` names it."""
    models: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)], RewardModelConfig],
        EVALUATED_IF_SET,
        NOT_REWARDED,
        OTHER_REWARDS,
        _REWARD_MODEL,
    ] = Field(default_factory=dict)
    """Several reward models by name, all of which each worker holds. The component `{name: reward_model, args: {model:
    NAME}}`, of `functions` or of the rewards of a source, is the score of one."""
    model_weight: Annotated[float, COUNTED, OTHER_REWARDS] = 1.0
    """Weight of the score of `model`."""
    micro_batch_tokens: Annotated[int, UNCOUNTED] = Field(default=4096, ge=8)
    """Maximum number of tokens in one forward pass of a reward model."""
    memory_limit_mib: Annotated[int, UNCOUNTED] = Field(default=2048, ge=64)
    """Maximum memory that the process of one reward function may allocate, in MiB. Reserved addresses and shared
    mappings do not count."""
    threads: Annotated[int, UNCOUNTED] = Field(default=0, ge=0)
    """Compute threads of the reward models (CPU only). 0: as many as the role's `cpus`, at least one."""

    @property
    def components(self) -> tuple[RewardFunctionConfig, ...]:
        """The reward's components: `functions`, and `model` unless one of them names it."""
        if self.model is None or any(function.model == REWARD_MODEL for function in self.functions):
            return self.functions
        return (*self.functions, RewardFunctionConfig(name=REWARD_MODEL, weight=self.model_weight))

    @property
    def reward_models(self) -> dict[str, RewardModelConfig]:
        """The reward models by the name that components give them."""
        return dict(self.models) if self.model is None else {REWARD_MODEL: self.model, **self.models}


class ScoringConfig(RewardConfig):
    """Configuration of one reward worker: the rewards of the role, and of data that have their own."""

    sets: dict[str, tuple[RewardFunctionConfig, ...]] = Field(default_factory=dict)
    """Reward functions by the path of the section that they belong to (`data.eval.math500`), used instead of the
    role's functions and reward model."""
    teacher_tokens: bool = False
    """Whether the samples that it writes have the teachers' likeliest tokens."""


class EngineProcess(Frozen):
    """What the processes of an engine need to know before they import vLLM."""

    device: Device
    threads: int
    enforce_eager: bool


class EngineWorkerConfig(Frozen):
    """Configuration of a worker with an engine."""

    model: ModelConfig
    engine: EngineConfig
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by name."""
    device: Device

    @property
    def process(self) -> EngineProcess:
        """What its processes need to know before they import vLLM."""
        engine = self.engine
        return EngineProcess(device=self.device, threads=engine.threads, enforce_eager=engine.enforce_eager)


class JudgeConfig(EngineWorkerConfig):
    """Configuration of one judge worker."""

    max_tokens: int
    """Longest answer, in tokens."""
    temperature: GreedyOrTemperature
    """0: greedy."""
    structured: StructuredConfig | None
    """A form that every answer has."""
    expected: bool = False
    """Whether answers have the log-probs of their tokens, for the expectation of a score."""


PlayerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
POLICY, JUDGE = "policy", "judge"
"""The roles whose models play as players of a game."""


class CompactionConfig(Frozen):
    """How a conversation that has become long continues: as a new one, with its beginning and its last turns. The
    tokens before are a row of the sample, and those from there on another one."""

    consequences: ClassVar = EVALUATED_IF_SET
    at: float = Field(default=0.75, gt=0.0, lt=1.0)
    """Share of the engine's `max_model_len` that a conversation may have before the environment's answer."""
    keep_turns: int = Field(default=2, ge=1)
    """Last turns of the policy that stay, with the answers to them. The messages before its first turn stay, too."""
    summary: str | None = Field(default=None, min_length=1)
    """What the policy is asked when turns are left out, such as `Summarize what you have found so far.` Its response,
    which is a turn and trained as one, takes their place. null, or if there is no room for it: nothing does."""


BUDGETS = ("max_turns", "max_sampled_tokens", "max_total_tokens", "max_seconds")
"""Fields of `EpisodeConfig`, and finish reasons of episodes that end as they are when one of them is used up."""


class EpisodeConfig(Frozen):
    """Bounds of an episode, and how its turns are read."""

    max_turns: Annotated[int, EVALUATED] = Field(default=8, ge=1)
    """Most turns of the policy in an episode; then it ends as it is, with the finish reason `max_turns`."""
    turn_timeout_s: Annotated[float, NOT_EVALUATED] = Field(default=30.0, gt=0.0)
    """Longest answer of the environment; a longer one fails the sample."""
    episode_timeout_s: Annotated[float, NOT_EVALUATED] = Field(default=300.0, gt=0.0)
    """Longest episode, the policy's turns included; a longer one fails the sample."""
    max_sampled_tokens: Annotated[int | None, EVALUATED_IF_SET] = Field(default=None, ge=1)
    """Most tokens that are sampled in an episode, over all of its turns; then it ends as it is, with the finish reason
    `max_sampled_tokens`. null: no limit."""
    max_total_tokens: Annotated[int | None, EVALUATED_IF_SET] = Field(default=None, ge=1)
    """Most tokens of an episode's rows, with prompts and what the environment adds: what training computes. Then it
    ends as it is, with the finish reason `max_total_tokens`. null: no limit."""
    max_seconds: Annotated[float | None, EVALUATED_IF_SET] = Field(default=None, gt=0.0)
    """No turn begins after so many seconds of an episode; it ends as it is, with the finish reason `max_seconds`.
    null: no limit but `episode_timeout_s`, which fails the sample."""
    max_observation_chars: Annotated[int, EVALUATED_IF_SET] = Field(default=20_000, ge=1)
    """A longer message of the environment is cut, with a note. What it shows of the data's prompt does not count."""
    compaction: Annotated[CompactionConfig | None, EVALUATED_IF_SET] = None
    """How a conversation that becomes long continues; null: the episode ends when it has no room in `max_model_len`."""
    truncated_turns: Annotated[Literal["end", "continue"], EVALUATED] = "end"
    """After a turn that was cut at `sampling.max_tokens`. `end`: the environment gets it, and the episode ends with
    the finish reason `length`; `continue`: the episode continues after an end of turn that the policy did not
    sample."""
    tool_parser: Annotated[str | None, EVALUATED] = Field(default=None, min_length=1)
    """vLLM's parser for the tool calls in a turn, such as `hermes` or `llama3_json`; null: turns are plain text."""
    players: Annotated[dict[PlayerName, Literal["policy", "judge"]], EVALUATED_IF_SET] = Field(default_factory=dict)
    """Players of a game and the role whose model plays as them, such as `{white: policy, black: policy}`: `judge` is
    the frozen one of `roles.judge`. Each that the policy plays is a sample: a group of 8 samples (`group_size`) is 4
    episodes if the policy plays two. Left out: the environment has one player."""

    @property
    def trained(self) -> tuple[str, ...]:
        """The players that the policy plays, or none if the environment names none."""
        return tuple(name for name, role in self.players.items() if role == POLICY)

    @property
    def has_opponent(self) -> bool:
        """Whether the frozen model of `roles.judge` plays as one of the players."""
        return JUDGE in self.players.values()


class EnvironmentConfig(EpisodeConfig):
    """The environment that the policy acts in."""

    name: Annotated[str, EVALUATED] = Field(min_length=1)
    """A built-in environment (agent, guess_number, gymnasium, harbor, openenv, retry, single_turn, textarena,
    tools, user_simulator, verifiers) or `package.module:Class`."""
    args: Annotated[dict[str, Any], EVALUATED] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    python: Annotated[str | None, NOT_EVALUATED, Consequences(path="path")] = Field(default=None, min_length=1)
    """Interpreter of the virtual environment that it runs in, such as `venvs/games/bin/python`. null: the one that
    `troupe env install` has made for a built-in environment, or Troupe's own."""
    episodes: Annotated[int, NOT_EVALUATED] = Field(default=32, ge=1)
    """Most episodes under way in one worker, each in a separate process."""
    env: Annotated[tuple[str, ...], NOT_EVALUATED] = ()
    """Environment variables with secrets (`..._TOKEN`, `PASSWORD`, URLs with a password, ...) that the environment may
    read; it gets none but these."""
    memory_limit_mib: Annotated[int, NOT_EVALUATED] = Field(default=1024, ge=64)
    """Maximum memory that the process of one episode may allocate, in MiB. Reserved addresses and shared
    mappings do not count."""


class ImportanceConfig(Frozen):
    """Correction for the difference between sampler and trainer: w = exp(old_logprobs - rollout_logprobs).

    With it the objective is decoupled PPO's (arXiv 2110.00641): `old_logprobs` belong to the proximal policy that
    the ratio is clipped around, `rollout_logprobs` to the behaviour policy that sampled."""

    mode: Literal["none", "truncate", "mask"] = "truncate"
    """`none`: no correction; `truncate`: min(w, cap) (truncated importance sampling); `mask`: weight 0 for w outside
    [1/cap, cap]."""
    level: Literal["token", "sequence"] = "token"
    """`token`: every token has its own w; `sequence`: all tokens of a sample share the product of their w."""
    cap: float = Field(default=2.0, gt=1.0)
    """Upper bound of w."""


class DistillConfig(Frozen):
    """Divergence from the teachers, over more than the sampled token: a term of the policy's loss."""

    coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence in the loss; 0: none."""
    divergence: Literal["reverse", "forward", "jensen_shannon", "skewed"] = "forward"
    """With s and t the distributions of student and teacher: `reverse`: KL(s || t), which keeps the student to what the
    teacher finds likely; `forward`: KL(t || s), which makes it cover all of that; `jensen_shannon`: beta KL(t || m) +
    (1 - beta) KL(s || m), m = beta t + (1 - beta) s (GKD, arXiv 2306.13649, eq. 1); `skewed`: KL(t || alpha t + (1 -
    alpha) s) (DistiLLM, arXiv 2402.03898, sec. 3.1)."""
    support: Literal["teacher_top_k", "student_top_k", "full"] = "teacher_top_k"
    """Tokens that are compared: the `k` likeliest of the teacher or of the student, and all others together as one, or
    the whole vocabulary. All but `teacher_top_k` need the reference as teacher, with `colocate_with: policy`."""
    k: int = Field(default=64, ge=1)
    """Number of the likeliest tokens."""
    beta: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of the teacher in the mixture, and weight of its divergence (jensen_shannon)."""
    alpha: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the teacher in the mixture (skewed)."""

    @property
    def stored_k(self) -> int:
        """Tokens that a teacher stores for each response token; 0: none."""
        return self.k if self.coef and self.support == "teacher_top_k" else 0

    @property
    def in_process(self) -> bool:
        """Whether the teacher's logits are computed in the policy's workers, in its updates."""
        return self.coef > 0 and self.support != "teacher_top_k"


class CustomConfig(Frozen):
    """A custom algorithm (`workers/algorithms/custom.py`)."""

    name: str
    """`package.module:attribute`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function that returns it."""


class PolicyLossConfig(Frozen):
    """The policy's loss on one micro-batch."""

    objective: Literal[
        "clip", "policy_gradient", "soft_gate", "geometric", "divergence", "cispo", "kl_penalty", "likelihood", "custom"
    ] = "clip"
    """`clip`: PPO's clipped ratio (arXiv 1707.06347, eq. 7); `policy_gradient`: -advantage * ratio, not clipped (eq.
    6), which has REINFORCE's gradient in the first update on a batch and is corrected for the policy's change in later
    ones; `soft_gate`: the ratio through a sigmoid (SAPO, arXiv 2511.20347); `geometric`: the geometric mean of a
    sample's ratios, each clipped before (GMPO, arXiv 2507.20673); `divergence`: -advantage * ratio, without the tokens
    at which the policy has left the sampler's (DPPO, arXiv 2602.04879, eq. 12); `cispo`: -advantage * log-prob,
    weighted by the clipped ratio without gradient (arXiv 2506.13585, eq. 4); `kl_penalty`: the unclipped ratio plus
    beta * KL(old || new) (arXiv 1707.06347, eq. 8); `likelihood`: -advantage * log-prob at temperature 1, without any
    correction for who sampled the tokens (RAFT); `custom`: the function of the user's algorithm."""
    divergence: Literal["tv", "kl"] = "tv"
    """Objective divergence: the distance between sampler and policy, both as a choice between the sampled token and all
    others: total variation or KL (DPPO, eq. 13 and 14)."""
    custom: CustomConfig | None = None
    """Objective custom: the user's algorithm."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Level of the probability ratio. `token`: each token's own; `sequence`: the geometric mean over the sample
    (GSPO, arXiv 2507.18071, eq. 7); `sequence_token`: that mean with the gradient of each token (GSPO-token, eq.
    14)."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low (`gmpo`: exp(-clip_low); `clip_range` sets both clips). `dppo_tv`,
    `dppo_kl`: the largest divergence of a token that has become less likely."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high (`gmpo`: exp(clip_high); `clip_range` sets both clips). `dppo_tv`,
    `dppo_kl`: the largest divergence of a token that has become likelier."""
    dynamic_clip: bool = False
    """Widen the bounds for improbable tokens, from `clip_low`, `clip_high` and the old probability (DCPO, arXiv
    2509.02333, sec. 3.1)."""
    max_ratio: float | None = Field(default=None, gt=1.0)
    """Maximum of the upper bound, with `dynamic_clip`."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """If the advantage is negative, the loss is at most -dual_clip * advantage (arXiv 1912.09729)."""
    gate_positive: float = Field(default=1.0, gt=0.0)
    """Temperature of the gate for tokens with an advantage above 0 (sapo): the higher, the sooner a token whose ratio
    has left 1 loses its gradient."""
    gate_negative: float = Field(default=1.05, gt=0.0)
    """The same for the other tokens."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL-to-reference term in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(pi || pi_ref) per token (Schulman, "Approximating KL divergence", 2020)."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token_mean"
    """How token losses are reduced. `token_mean`: every token of the mini-batch has the same weight; `sequence_mean`:
    every sequence has the same weight, shared by its tokens; `sequence_sum`: the sum over a sequence's tokens, averaged
    over sequences; `constant`: the sum over tokens divided by sequences times `max_tokens` (Dr. GRPO);
    `only_token_mean`: the sum of the sequences' means, not divided (DCPO). A sequence is a sample, also if an episode
    has several rows."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction for the difference between sampler and trainer."""
    distill: DistillConfig = DistillConfig()
    """Divergence from a teacher."""
    observation_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of what the environment adds to episodes, with what the chat template puts
    around it: its mean over these tokens of the mini-batch, at the temperature of the loss (ECHO, arXiv 2605.24517).
    0: they have no loss."""

    @property
    def has_ratio(self) -> bool:
        """Whether the loss compares the policy with the one that sampled."""
        return self.objective != "likelihood"

    @property
    def needs_whole_samples(self) -> bool:
        """Whether the loss of a token depends on its sample's other tokens: the rows of a sample share a
        micro-batch."""
        if not self.has_ratio:
            return False
        one_weight = self.importance.mode != "none" and self.importance.level == "sequence"
        return self.objective == "custom" or self.ratio != "token" or one_weight


class CriticLossConfig(Frozen):
    """The critic's loss on one micro-batch."""

    value_clip: float | None = Field(default=0.2, gt=0.0)
    """New values are clipped to the old values plus or minus this; without it, the loss is the plain squared error."""


STEP_ESTIMATORS = frozenset({"group", "turn_group", "returns", "gae", "n_step"})
"""Advantage estimators that use process rewards; the others take one reward per response."""


class AdvantageConfig(Frozen):
    """How rewards become advantages (and, with a critic, returns)."""

    estimator: Literal[
        "group",
        "turn_group",
        "smooth_group",
        "decoupled_group",
        "max_likelihood",
        "best_of_subsets",
        "best_of_group",
        "preference_pair",
        "returns",
        "gae",
        "n_step",
        "distill",
        "none",
        "custom",
    ]
    """`group`: reward relative to the other samples of the group (GRPO); `turn_group`: also the return of each turn
    relative to turns of the group in the same state (GiGPO); `smooth_group`: also relative to earlier visits of the
    prompt (DCPO); `decoupled_group`: each component of the reward relative to the group, then summed
    (GDPO); `max_likelihood`: divided by the group's mean reward (MaxRL); `best_of_subsets`: the
    best reward of `pass_k` samples, relative to all choices of that many (pass@k training); `best_of_group`: samples
    per group for the best sample, 0 for the others (RAFT); `preference_pair`: the weight of DPO's gradient for the
    best sample, minus it for the worst, 0 for the others (online DPO);
    `returns`: sums of token rewards minus a baseline (REINFORCE family); `gae`, `n_step`: temporal differences of the
    critic; `distill`: log-prob under the teacher minus log-prob under the policy; `none`: 0, for a loss with another
    term; `custom`: the function of the user's algorithm."""
    custom: CustomConfig | None = None
    """Estimator custom: the user's algorithm."""
    normalize_by_std: bool = True
    """Estimators group, turn_group: divide by the group's standard deviation."""
    turn_gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Estimator turn_group: discount per turn of the return that a turn is compared by."""
    turn_coef: float = Field(default=1.0, ge=0.0)
    """Estimator turn_group: weight of the comparison of turns beside that of samples."""
    pass_k: int = Field(default=4, ge=2)
    """Estimator best_of_subsets: samples in a subset, whose best one counts. A group needs more samples than this."""
    dpo_beta: float = Field(default=0.1, gt=0.0)
    """Estimator preference_pair: beta of DPO, the strength of the implicit KL to the reference."""
    baseline: Literal[
        "none", "running_mean", "group_mean", "leave_one_out", "greedy", "player_average", "optimal_token"
    ] = "none"
    """returns: what is subtracted from a sample's return: nothing, the mean of all earlier batches, the mean of the
    group, the mean of the other samples of the group, the reward of the greedy response to the same prompt, the moving
    average of the returns of the same player in the same source, or, from each token's return, the mean of the group's
    returns from that token on, weighted by how uncertain each sample was so far (OTB)."""
    baseline_decay: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Baseline player_average: weight of the average so far against the next return."""
    reward_to_go: bool = True
    """returns: credit a token with the rewards from its position on; false: with the rewards of the whole response."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token (returns, gae, n_step)."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Exponential weight of longer returns, lambda (gae)."""
    n_steps: int = Field(default=8, ge=1)
    """Estimator n_step: tokens whose rewards are summed before the critic's value replaces the rest."""
    whiten: bool = False
    """Estimators returns, gae, n_step: normalize advantages to mean 0 and variance 1 over the batch's tokens."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Estimators returns, gae, n_step: clip the final advantages to plus or minus this."""
    covariance: Literal["keep", "drop", "penalize"] = "keep"
    """What happens to the tokens whose log-prob and advantage are both far above (or below) their means, which lower
    the entropy most (arXiv 2505.22617): nothing, no gradient (Clip-Cov), or a penalty on |log pi - log pi_old|
    (KL-Cov)."""
    cov_share: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Share of the batch's tokens that are dropped or penalized, at least one (clip_cov, kl_cov)."""
    cov_low: float = Field(default=1.0, ge=0.0)
    """clip_cov: only tokens with a covariance above this are dropped."""
    cov_high: float = Field(default=5.0, gt=0.0)
    """clip_cov: only tokens with a covariance below this are dropped."""
    cov_penalty: float = Field(default=1.0, gt=0.0)
    """kl_cov: coefficient of |log pi - log pi_old|."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """returns, gae, n_step: add -kl_coef * (old_logprobs - ref_logprobs) to every token's reward."""
    kl_to_go: bool = True
    """returns: credit a token with the KL terms from its position on; false: with its own only (ReMax)."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt the coefficient so that the KL divergence of a response approaches this target, in nats."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples over which the coefficient adapts (arXiv 1909.08593, sec. 2.2); a batch counts as at most that many."""
    reward_scale: Literal["none", "batch", "running"] = "none"
    """Estimators returns, gae, n_step: normalize sequence rewards to mean 0 and variance 1, over the batch or over all
    batches so far (PPO-max, arXiv 2307.04964)."""
    reward_clip: float | None = Field(default=None, gt=0.0)
    """Estimators returns, gae, n_step: clip the (scaled) sequence reward to plus or minus this."""

    @property
    def reads_square_sums(self) -> bool:
        """Whether the baseline reads the policy's distributions before the update (`SQUARE_SUMS`)."""
        return self.baseline == "optimal_token"


class RolloutConfig(EngineWorkerConfig):
    """Configuration of one rollout worker."""

    sampling: SamplingConfig
    seed: int
    transfer_backend: TransferBackend
    episodes: dict[str, EpisodeConfig] = Field(default_factory=dict)
    """Bounds of an episode in each environment, by its name, empty for one without a name."""
    turn_forms: bool = False
    """Whether a turn of an episode can have a form: the loss then accounts for the tokens that it permits."""
    sleep: Sleep = "none"
    """What the engine releases while it sleeps."""
    kv_cache_bytes: int | None = None
    """KV cache of each GPU, if others share it, or None for what vLLM finds free (`gpu_memory_utilization`)."""
    top_logprobs: int = 0
    """Number of likeliest tokens whose log-probs are returned with each sampled one's."""
    lora: LoraConfig | None = None
    """The policy's adapters, which the engine loads on top of the model, or None if it loads all weights."""


class RankConfig(Frozen):
    """Configuration of one rank of a training group."""

    model: ModelConfig
    trainer: TrainerConfig
    total_updates: int
    """Optimizer updates the learning-rate schedule spans."""
    seed: int
    device: Device
    deterministic: bool = False
    """Whether repeated updates are equal bit for bit."""
    lora: LoraConfig | None = None
    """Train adapters (and a critic's or reward model's head), or all weights if None."""


class PolicySettings(Frozen):
    """Settings of a role `policy` that its workers get as they are."""

    share_prompts: bool = True
    """Train the samples of a group behind one copy of their prompt if they are packed and it saves work; the result
    is the same to float tolerance."""


class TeacherSettings(Frozen):
    """Settings of a teacher that its scorer gets as they are."""

    prompt: str | None = None
    """What it reads in place of the last message of the user, with `{prompt}` for that, `{answer}` and the columns of
    the data's `metadata`: a hint or the answer, which the policy does not see. The response behind it is the same. With
    the policy's model it is the policy that knows more (self-distillation); null: what the policy reads."""
    average: bool = False
    """With `colocate_with: policy`: score with the moving average of the policy's weights (`roles.policy.ema_decay`)
    instead of the weights."""


class PolicyConfig(PolicySettings, RankConfig):
    """Configuration of one rank of the policy."""

    loss: PolicyLossConfig
    source_losses: dict[str, PolicyLossConfig] = Field(default_factory=dict)
    """The losses of sources with their own, by name."""
    advantage: AdvantageConfig
    source_advantages: dict[str, AdvantageConfig] = Field(default_factory=dict)
    """How rewards become advantages in sources with their own, by name."""
    sampling: SamplingConfig
    run_id: str
    """Run id, part of the name of the shared-memory weight file."""
    reference_model: ModelConfig | None
    """A frozen reference to load with the policy (colocated)."""
    teachers: dict[str, TeacherSettings] = Field(default_factory=dict)
    """The teachers that are the policy, by role."""
    transfer_backend: TransferBackend = "shm"
    weight_store: str | None = None
    """URL of the object store that weights go through on their way to other nodes."""
    ptx_coef: float = 0.0
    """Weight of the texts' negative log-likelihood (PPO-ptx)."""
    records_tokens: bool = False
    """Keep log-probs and entropies of the updates until they are taken."""


class CriticConfig(RankConfig):
    """Configuration of one rank of the critic."""

    loss: CriticLossConfig


class ReferenceConfig(Frozen):
    """Configuration of one worker of the reference or a teacher."""

    model: ModelConfig
    column: str = "ref_logprobs"
    """Column of its log-probs."""
    prompt: str | None = None
    """Template of the prompts that it reads, or None for the policy's."""
    tokenizer: ModelConfig | None = None
    """The model that has the tokenizer and chat template of these prompts, or None for its own."""
    temperature: float
    micro_batch_tokens: int
    top_k: int = 0
    """Likeliest tokens to store for each response token (`DistillConfig.stored_k`)."""
    shards: int = 1
    threads: int
    device: Device


class Rendezvous(Frozen):
    """Address of a training group, and the rank with which a process joins it."""

    address: str
    port: int
    rank: int
    world_size: int

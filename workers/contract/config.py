"""Worker configuration: frozen, validated models that the spec is also made of.

The spec (`orchestrator/spec/rollout.py`) embeds these models in the sections that are passed to a worker unchanged, so
that every field is described and checked in one place.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from troupe.workers.contract.algorithm_config import (
    AdvantageConfig,
    CriticLossConfig,
    NaturalGradientConfig,
    PolicyLossConfig,
)
from troupe.workers.contract.config_base import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Device,
    Frozen,
    GreedyOrTemperature,
    ModelConfig,
)
from troupe.workers.contract.consequences import (
    COUNTED,
    EVALUATED,
    EVALUATED_IF_SET,
    NOT_EVALUATED,
    UNCOUNTED,
    Consequences,
)
from troupe.workers.contract.endpoint import EndpointConfig
from troupe.workers.contract.templates import DEMONSTRATION, FEEDBACK, template_fields
from troupe.workers.contract.trainer_config import LoraConfig, TrainerConfig
from troupe.workers.contract.weight_backends import TransferBackend

CPU_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables of a process that computes on the CPU. With them, a waiting OpenMP thread sleeps. By default it
spins and takes CPU time from the workers that share its cores."""


Sleep = Literal["none", "kv_cache", "weights"]
"""What an engine releases while the trainer on its GPU updates: nothing, its KV cache, or also its weights."""


OWN_GPU_SHARE = 0.85
"""Fraction of a GPU's memory for an engine that has it to itself, by default."""


GPU_BATCH_TOKENS = 8192
"""Tokens of an engine's largest batch on a GPU (vLLM's `max_num_batched_tokens`), for which it reserves memory, unless
its sequences have fewer (`EngineConfig.gpu_batch_tokens`)."""


TEACHER_BATCH_TOKENS = 2048
"""The same for an engine that returns the log-probs of whole prompts: vLLM reserves no memory for their logits."""


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


MAX_TOP_K = 2**31 - 1
"""vLLM holds it in 32 bits."""


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
    """Sample from the k most probable tokens (more if probabilities are equal); 0 turns it off."""
    min_p: Annotated[float, NOT_EVALUATED] = Field(default=0.0, ge=0.0, lt=1.0)
    """Sample from the tokens whose probability is at least this share of the most probable one's; 0 turns it
    off."""
    max_tokens: Annotated[int, EVALUATED] = Field(default=256, ge=1)
    """Longest response, in tokens; longer ones are truncated, with the finish reason `length`."""
    stop: Annotated[tuple[str, ...], EVALUATED_IF_SET] = ()
    """Strings that end a response, besides the model's ends of a turn; special tokens in them match. The response
    includes them: they are scored and trained."""
    structured: Annotated[StructuredConfig | None, EVALUATED_IF_SET] = None
    """A form that every response (of an episode: every turn) has; null: any text. Log-probs of samples are then those
    among the permitted tokens, and the importance weight of a token is the probability that the policy gives to all
    permitted ones. With `top_p`, `top_k` or `min_p` the form is part of the recorded tokens."""

    router_replay: Annotated[bool, NOT_EVALUATED, UNCOUNTED] = False
    """Routing replay (R3): engines on GPUs record the experts of every token of a mixture of experts, and the trainer
    runs the token through the same ones."""

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
    """Sample from the k most probable tokens; 0 turns it off."""
    min_p: Annotated[float, EVALUATED_IF_SET] = Field(default=0.0, ge=0.0, lt=1.0)
    """Sample from the tokens whose probability is at least this share of the most probable one's; 0 turns it
    off."""
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


class GuestEngineConfig(EngineWorkerConfig):
    """Configuration of a worker with an engine that may be on the policy's GPU."""

    sleep: Sleep = "none"
    """What the engine releases while it sleeps."""
    kv_cache_bytes: int | None = None
    """KV cache of each GPU, if others share it, or None for what vLLM finds free (`gpu_memory_utilization`)."""


class RolloutConfig(GuestEngineConfig):
    """Configuration of one rollout worker."""

    sampling: SamplingConfig
    seed: int
    transfer_backend: TransferBackend
    episodes: dict[str, EpisodeConfig] = Field(default_factory=dict)
    """Bounds of an episode in each environment, by its name, empty for one without a name."""
    turn_forms: bool = False
    """Whether a turn of an episode can have a form: the loss then accounts for the tokens that it permits."""
    top_logprobs: int = 0
    """Number of likeliest tokens whose log-probs are returned with each sampled one's, and are part of the samples for
    training."""
    lora: LoraConfig | None = None
    """The policy's adapters, which the engine loads on top of the model, or None if it loads all weights."""
    compares_reference: bool = False
    """Whether a group for training has a response of the reference for each of its samples."""


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


class TeacherPrompt(Frozen):
    """What a teacher reads."""

    prompt: str | None = None
    """What it reads in place of the last message of the user, with `{prompt}` for that, `{answer}` and the columns of
    the data's `metadata`: a hint or the answer, which the policy does not see; with `colocate_with: policy` also
    `{feedback}`, the text that comes with the sample's reward, and `{demonstration}`, another response of its group.
    The response behind it is the same. With the policy's model it is the policy that knows more (self-distillation);
    null: what the policy reads."""

    @property
    def reads_rewards(self) -> bool:
        """Whether the prompt has feedback or a demonstration: a sample without any is not taught."""
        return not {FEEDBACK, DEMONSTRATION}.isdisjoint(template_fields(self.prompt or ""))


class TeacherSettings(TeacherPrompt):
    """Settings of a teacher that its scorer gets as they are."""

    average: bool = False
    """With `colocate_with: policy`, and no `model`: score with the moving average of the policy's weights
    (`roles.policy.ema_decay`) instead of the weights."""
    demonstration_reward: float = 1.0
    """Lowest reward of a response that a sample's `{demonstration}` may be. It is the response of the sample's group,
    other than its own, with the highest reward."""


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
    """The teachers in the policy's workers, by role."""
    teacher_models: dict[str, ModelConfig] = Field(default_factory=dict)
    """Frozen models of `teachers` whose model is not the policy's, by role."""
    teacher_adapters: dict[str, str] = Field(default_factory=dict)
    """Folders of the adapters of `teachers` that share the policy's model, by role. They replace
    the adapters that train."""
    transfer_backend: TransferBackend = "shm"
    weight_store: str | None = None
    """URL of the object store that weights go through on their way to other nodes."""
    ptx_coef: float = 0.0
    """Weight of the texts' negative log-likelihood (PPO-ptx)."""
    natural_gradient: NaturalGradientConfig | None = None
    """TRPO's step in place of AdamW's."""
    records_tokens: bool = False
    """Keep log-probs and entropies of the updates until they are taken."""


class CriticConfig(RankConfig):
    """Configuration of one rank of the critic."""

    loss: CriticLossConfig


class ScoresConfig(TeacherPrompt):
    """What a worker that scores samples reads and writes."""

    column: str = "ref_logprobs"
    """Column of its log-probs."""
    tokenizer: ModelConfig | None = None
    """The model that has the tokenizer and chat template of `prompt`, or None for its own."""
    top_k: int = 0
    """Likeliest tokens to store for each response token (`DistillConfig.stored_k`)."""


class ReferenceConfig(ScoresConfig):
    """Configuration of one worker of the reference or a teacher."""

    model: ModelConfig
    temperature: float
    micro_batch_tokens: int
    shards: int = 1
    threads: int
    device: Device


class TeacherEngineConfig(ScoresConfig, GuestEngineConfig):
    """Configuration of one worker of a teacher that is an engine."""

    @property
    def batch_tokens(self) -> int:
        """Tokens of the engine's largest batch, whose logits vLLM computes at once. On the CPU a whole prompt."""
        if self.device == "cpu":
            return self.engine.max_model_len
        return max(self.engine.max_num_seqs, min(TEACHER_BATCH_TOKENS, self.engine.gpu_batch_tokens))


class TeacherEndpointSettings(EndpointConfig):
    """Settings of a teacher behind an endpoint that its worker gets as they are."""

    timeout_s: float = Field(default=300.0, gt=0.0)
    """Timeout for the log-probs of a sequence, with repetitions and the wait for one of `concurrency` places. A sample
    without them is dropped."""


class TeacherEndpointConfig(ScoresConfig, TeacherEndpointSettings):
    """Configuration of one worker of a teacher behind an endpoint."""

    policy: ModelConfig
    """The model whose tokens it reads."""
    longest: int
    """Tokens of the policy's longest sequence."""


class Rendezvous(Frozen):
    """Address of a training group, and the rank with which a process joins it."""

    address: str
    port: int
    rank: int
    world_size: int

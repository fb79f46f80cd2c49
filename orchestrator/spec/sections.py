"""The sections of a spec: what a user may write, field by field.

Where a section reaches a worker unchanged it is built on the worker's own model (`workers/config.py`), so that a
field is described, typed and bounded once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from workers.config import EngineConfig, EvalSampling, Frozen, ModelConfig, RewardConfig, TrainerConfig

RoleName = Literal["rollout", "policy", "critic", "reference", "reward"]
_LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=_LABEL)]


class Placement(Frozen):
    """How many workers a role has and what each one books."""

    workers: int = Field(default=1, ge=1)
    """Workers of this role: the number to scale."""
    cpus: float = Field(default=1.0, gt=0.0)
    """CPU cores booked for each worker (may be a fraction)."""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs booked for each worker (may be a fraction); 0 runs the role on the CPU."""
    accelerator: str | None = Field(default=None, pattern=_LABEL)
    """Only on nodes with GPUs of this type, by Ray's name of it, as in `H200`."""
    node_labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Only on nodes with all of these labels, as in `{zone: a}` (`ray start --labels`)."""
    strategy: Literal["pack", "spread"] = "pack"
    """Put the workers on as few nodes as they fit on, or on as many as have room for one."""
    colocate_with: RoleName | None = None
    """Live with another role: `reference` inside the policy's workers, `rollout` on the policy's GPUs."""


class ScaledRole(Placement):
    """A role whose workers may come and go while the run goes on (`troupe scale`)."""

    min_workers: int = Field(default=1, ge=1)
    """Fewest workers a running run may be scaled to."""
    max_workers: int | None = Field(default=None, ge=1)
    """Most workers a running run may be scaled to; null: as many as the cluster holds."""


class AutoscaleConfig(Frozen):
    """Engines come and go by how long the trainer waits for them."""

    max_wait: float = Field(gt=0.0, lt=1.0)
    """Share of a step the trainer may wait for samples; above it an engine is added, up to `max_workers`."""
    min_wait: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Below this share an engine leaves, down to `min_workers`; 0: none ever does."""
    steps: int = Field(default=3, ge=1)
    """Steps in a row that must agree. Counting begins anew once an engine has come or gone."""


class RolloutRole(EngineConfig, ScaledRole):
    """Workers that sample: one vLLM engine each."""

    autoscale: AutoscaleConfig | None = None
    """Add and take away engines by how long the trainer waits for them; null: only `troupe scale` does."""


class TrainerRole(TrainerConfig, Placement):
    """Workers that train a model: one DeepSpeed rank each."""

    def trainer_config(self) -> TrainerConfig:
        """What a rank is told of its training."""
        told: dict[str, Any] = {name: value for name, value in self if name in TrainerConfig.model_fields}
        told["threads"] = self.threads or max(1, int(self.cpus))
        return TrainerConfig(**told)


class PolicyRole(TrainerRole):
    """Workers that train the policy: one DeepSpeed rank each."""

    share_prompts: bool = True
    """Train the samples of a group behind one copy of their prompt where the model can and it saves work; the result is
    the same to float tolerance."""


class CriticRole(TrainerRole):
    """Workers that train the critic: one DeepSpeed rank each."""

    model: ModelConfig | None = None
    """Pretrained model the critic starts from (a value head is added); the policy's where left out."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic learns."""


class ReferenceRole(Placement):
    """The frozen model the policy is held close to."""

    model: ModelConfig | None = None
    """Pretrained reference model; the policy's starting point where left out."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens (padding included) in one forward pass of one worker."""
    threads: int = Field(default=0, ge=0)
    """Compute threads (CPU only). 0: as many as the role's `cpus`, at least one."""


class ScaledReferenceRole(ReferenceRole, ScaledRole):
    """The frozen model the policy is held close to."""


class RewardRole(RewardConfig, ScaledRole):
    """Workers that judge responses, by functions, by a reward model or by both."""


class RolesConfig(Frozen):
    """The cast."""

    rollout: RolloutRole
    """Workers that sample: one vLLM engine each."""
    policy: PolicyRole
    """Workers that train the policy."""
    critic: CriticRole | None = None
    """Workers that train the critic; only where the algorithm has one."""
    reference: ScaledReferenceRole | None = None
    """The frozen reference; needed where `algorithm.kl.coef` is above 0."""
    reward: RewardRole
    """Workers that judge responses."""

    def present(self) -> dict[RoleName, Placement]:
        """The roles this spec has, by name."""
        roles: dict[RoleName, Placement | None] = {
            "rollout": self.rollout,
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.reward,
        }
        return {name: role for name, role in roles.items() if role is not None}

    def scaled(self) -> dict[RoleName, ScaledRole]:
        """The roles whose workers may come and go, by name: those that live with no other."""
        roles: dict[RoleName, ScaledRole | None] = {
            "rollout": self.rollout,
            "reference": self.reference,
            "reward": self.reward,
        }
        return {name: role for name, role in roles.items() if role is not None and role.colocate_with is None}

    def trainers(self) -> dict[RoleName, TrainerRole]:
        """The roles that train, by name."""
        trainers: dict[RoleName, TrainerRole] = {"policy": self.policy}
        if self.critic is not None:
            trainers["critic"] = self.critic
        return trainers


class ScheduleConfig(Frozen):
    """How long the run is, how a step is cut, and how long anything may take."""

    steps: int = Field(ge=1)
    """Training steps."""
    prompts_per_step: int = Field(ge=1)
    """Prompts (groups) in a step's batch."""
    max_staleness: int = Field(default=0, ge=0)
    """Policy versions a sample's oldest token may lag behind the one it trains; 0 is synchronous training."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates in one pass."""
    start_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest start of a worker: its place in the cluster, its process, its model."""
    generate_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest time for one group on an engine; then it is tried again elsewhere."""
    score_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest call to a reward, reference or critic worker."""
    train_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Longest call to a training group (prepare, update, save, load)."""
    sync_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest weight update of the engines."""
    step_timeout_s: float = Field(default=7200.0, gt=0.0)
    """Longest step; then the run stops with an error."""


class PromptText(Frozen):
    """How a row's text becomes a prompt."""

    system: str = ""
    """System message put before the prompt; none where empty. A row that brings its own keeps it."""
    template: str = "{prompt}"
    """The user message; `{prompt}` stands for the row's text."""
    max_chars: int = Field(default=20_000, ge=1)
    """A prompt or answer with more characters is a bad row."""


class _Located(Frozen):
    """Where rows are, and how many of them are read."""

    path: str = Field(min_length=1)
    """Where the data is; relative paths start at the current directory."""
    limit: int = Field(default=0, ge=0)
    """Read only this many rows; 0: all."""


class JsonlFile(_Located):
    """A file with one JSON object per line."""

    kind: Literal["jsonl"]
    """A file with one JSON object per line."""


class ParquetFile(_Located):
    """A Parquet file."""

    kind: Literal["parquet"]
    """A Parquet file."""


class DatasetsFolder(_Located):
    """A folder written by `save_to_disk` of the `datasets` library."""

    kind: Literal["datasets"]
    """A folder written by `save_to_disk` of the `datasets` library."""
    split: str | None = None
    """Split to read, where the folder holds several."""


class _Prompts(PromptText):
    """The columns of a table of prompts."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`."""
    answer: str | None = "answer"
    """Column with the right answer, as the reward functions read it; null: there is none."""
    metadata: tuple[str, ...] = ()
    """Further columns handed to the reward functions."""


class JsonlSource(_Prompts, JsonlFile):
    """A file with one JSON object per line."""


class ParquetSource(_Prompts, ParquetFile):
    """A Parquet file."""


class DatasetsSource(_Prompts, DatasetsFolder):
    """A folder written by `save_to_disk` of the `datasets` library."""


class _Texts(Frozen):
    """The column of a table of texts, and how much of them a step learns."""

    text: str = "text"
    """Column with the text."""
    max_tokens: int = Field(default=512, ge=2)
    """A longer text is cut into pieces of this many tokens."""
    texts_per_step: int = Field(default=16, ge=1)
    """Pieces of text learnt in each step."""


class JsonlTexts(_Texts, JsonlFile):
    """A file with one JSON object per line."""


class ParquetTexts(_Texts, ParquetFile):
    """A Parquet file."""


class DatasetsTexts(_Texts, DatasetsFolder):
    """A folder written by `save_to_disk` of the `datasets` library."""


TextSource = Annotated[JsonlTexts | ParquetTexts | DatasetsTexts, Field(discriminator="kind")]


class RecipeConfig(Frozen):
    """One task family of reasoning-gym."""

    name: str = Field(min_length=1)
    """Task family, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0.0)
    """Share of the source's prompts, relative to the other recipes."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task family (its difficulty)."""


class ReasoningGymSource(PromptText):
    """Tasks made by reasoning-gym, offline; the same seed makes the same tasks."""

    kind: Literal["reasoning_gym"]
    """Tasks made by reasoning-gym, offline."""
    recipes: tuple[RecipeConfig, ...] = Field(min_length=1)
    """Task families to draw from."""
    size: int = Field(ge=1, le=10_000_000)
    """Prompts over all recipes."""
    seed: int = Field(ge=0, lt=2**31)
    """Seed of the tasks; different seeds make different ones (though a small family repeats itself)."""


DataSource = Annotated[JsonlSource | ParquetSource | DatasetsSource | ReasoningGymSource, Field(discriminator="kind")]


class DataConfig(Frozen):
    """Where prompts come from."""

    train: DataSource
    """Prompts to train on."""
    eval: DataSource | None = None
    """Prompts to evaluate on."""
    held_out: bool = True
    """Leave out of `eval` every prompt that also stands in `train`."""
    ptx: TextSource | None = None
    """Plain texts the policy goes on to learn in every update (`algorithm.ptx_coef`)."""


class EvaluationConfig(Frozen):
    """When and how the policy is evaluated on `data.eval`."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between evaluations; 0: none in between."""
    prompts: int = Field(default=0, ge=0)
    """Prompts per evaluation, always the same ones; 0: all."""
    at_start: bool = True
    """Evaluate the untrained policy."""
    at_end: bool = True
    """Evaluate after the last step."""
    sampling: EvalSampling = EvalSampling()
    """How responses are sampled."""


class WeightSyncConfig(Frozen):
    """How new weights reach the engines."""

    backend: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    """`auto`: shm (shared memory) on the CPU, ipc where rollout and policy share GPUs, nccl otherwise."""


class CheckpointConfig(Frozen):
    """When the run's state is saved."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints kept."""


class AlarmConfig(Frozen):
    """When a rising reward looks hacked: above its mean so far while one of these is passed."""

    kl: float | None = Field(default=None, gt=0.0)
    """KL divergence from the reference, per token, in nats (needs the role `reference`)."""
    repetition: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a response's 4-grams that stood in it before."""
    response_tokens: float | None = Field(default=None, gt=0.0)
    """Mean response length."""
    action: Literal["warn", "stop"] = "warn"
    """What follows: a warning and the metric `alarm/reward_hacking`, or the (saved) end of the run as well."""


class FailureConfig(Frozen):
    """What is borne, and when the run stops."""

    engine_restarts: int = Field(default=3, ge=0)
    """Times a rollout engine may be started again, over the whole run."""
    max_attempts: int = Field(default=3, ge=1)
    """Times a group is tried before it is dropped."""
    max_failed_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of a step's samples that may fail before the run stops."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """A row of the data that cannot be used is counted and skipped, or stops the run."""
    nonfinite_steps: int = Field(default=3, ge=1)
    """Updates in a row with a gradient that is not finite before the run stops."""
    health_interval_s: float = Field(default=20.0, gt=0.0)
    """Seconds between signs of life asked of every engine."""
    health_misses: int = Field(default=3, ge=1)
    """Signs of life missed in a row before an engine is given up."""
    alarm: AlarmConfig | None = None
    """Watch for a reward that is hacked and not earned."""


class OutputConfig(Frozen):
    """What the run writes, besides its log, metrics and checkpoints."""

    folder: str = Field(default="runs", min_length=1)
    """Runs are written to folders in here, by the spec's name."""
    trajectories: bool = True
    """Write every step's samples as Parquet."""
    tensorboard: bool = False
    """Write TensorBoard event files."""

"""The roles of a spec: how many workers each has, on what, and what they are given.

A role that reaches a worker unchanged is built on the worker's own model (`workers/contract/config.py`), so that
a field is described, typed and bounded once.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, field_validator

from troupe.orchestrator.spec.sources import (
    MAP,
    SECTION,
    Name,
)
from troupe.workers.contract.config import (
    EngineConfig,
    EnvironmentConfig,
    PolicySettings,
    Sleep,
    StructuredConfig,
    TeacherEndpointSettings,
    TeacherPrompt,
    TeacherSettings,
)
from troupe.workers.contract.config_base import Device, Frozen, GreedyOrTemperature, ModelConfig
from troupe.workers.contract.consequences import (
    ALLOWED,
    EVALUATED_BY_SET,
    EVALUATED_IF_SET,
    LIVE,
    NONE,
    REWARDED,
    SAMPLED,
    UNCOUNTED,
    Consequences,
    Resume,
    noted,
    refused,
)
from troupe.workers.contract.reward_config import RewardConfig
from troupe.workers.contract.templates import TEACHER_FIELDS, checked_fields
from troupe.workers.contract.trainer_config import LoraConfig, TrainerConfig

ConfigT = TypeVar("ConfigT", bound=Frozen)

RoleName = Literal[
    "rollout", "policy", "critic", "reference", "reference_engine", "teacher", "reward", "environment", "judge"
]
MOST_WORKERS = 16_384
"""Most workers of a role: a larger number is a mistake."""
_LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=_LABEL)]


_OTHER_REFERENCE = noted("the reference is another one from now on")
OTHER_REFERENCE = Consequences(itself=_OTHER_REFERENCE.resume)
_OTHER_TRAINERS = Consequences(itself=Resume(refused="the checkpoint was written with the other set of trainers"))
RESHARDED = Consequences(of={"workers": noted("optimizer states are resharded")})


class RoleResources(Frozen):
    """How many workers a role has, and the resources that each one reserves."""

    consequences: ClassVar = NONE
    row: ClassVar[str | None] = None
    """Row of the table of roles, or None for the row of the section."""
    workers: Annotated[int, LIVE] = Field(default=1, ge=1, le=MOST_WORKERS)
    """Workers of this role: the number to scale."""
    cpus: float = Field(default=1.0, gt=0.0)
    """CPU cores reserved for each worker (may be a fraction)."""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs reserved for each worker (may be a fraction); 0 runs the role on the CPU."""
    accelerator: str | None = Field(default=None, pattern=_LABEL)
    """Place the workers only on nodes with GPUs of this type, by Ray's name, such as `H200`."""
    node_labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Place the workers only on nodes with all of these labels, such as `{zone: a}` (`ray start --labels`)."""
    strategy: Literal["pack", "spread"] = "pack"
    """`pack`: place the workers on as few nodes as they fit on; `spread`: on as many as have room for one."""
    colocate_with: RoleName | None = None
    """Colocate with another role: `reference` inside the policy's workers; `rollout`, `reference_engine` and teachers
    of the kind `engine` on the policy's GPUs. There `workers` and `gpus` can be left out: one engine for each policy
    worker, and an equal part of its GPU each; with `tensor_parallel_size` N one for every N policy workers, on their
    GPUs."""

    @property
    def device(self) -> Device:
        """Device that the role's workers run on."""
        return "cuda" if self.gpus > 0 else "cpu"

    def part(self, config: type[ConfigT], **others: Any) -> ConfigT:
        """A worker configuration made of the fields that this section shares with it. `others`: fields of the
        configuration that this section does not have, or has with another value."""
        return config(**({name: value for name, value in self if name in config.model_fields} | others))

    def worker_config(self, config: type[ConfigT], **others: Any) -> ConfigT:
        """See `part`. Section and configuration have a field `threads`: 0 becomes the role's `cpus`, at least one."""
        return self.part(config, **({"threads": dict(self)["threads"] or max(1, int(self.cpus))} | others))


class ScaledRole(RoleResources):
    """A role whose number of workers can change during the run (`troupe scale`)."""

    consequences: ClassVar = NONE
    min_workers: Annotated[int, LIVE] = Field(default=1, ge=1, le=MOST_WORKERS)
    """Fewest workers the role can be scaled to during the run."""
    max_workers: Annotated[int | None, LIVE] = Field(default=None, ge=1, le=MOST_WORKERS)
    """Most workers the role can be scaled to during the run; null: as many as the cluster has room for."""


class EngineRole(EngineConfig, ScaledRole):
    """Workers with one vLLM engine each."""

    engine: Annotated[dict[str, Any], UNCOUNTED] = Field(default_factory=dict)
    """Further options of vLLM's engine, by the name of the argument of its `EngineArgs`, such as
    `{scheduling_policy: priority}`. Options that Troupe sets itself, or that cannot work with it, are refused."""


class GuestEngineRole(EngineRole):
    """Workers with one vLLM engine each, which may be on the policy's GPUs."""

    sleep: Annotated[Sleep | None, UNCOUNTED] = None
    """What an engine on the policy's GPU releases while the policy trains: `none`, its `kv_cache`, or also its
    `weights`. The policy's weights then come back with every new version, other models' from host memory. The
    optimizer uses the released memory, and is in host memory while engines sample or score. null: `kv_cache` if they
    share a GPU, else `none`."""

    @property
    def resolved_sleep(self) -> Sleep:
        """What its engines release while the policy trains, null resolved."""
        if self.sleep is not None:
            return self.sleep
        return "kv_cache" if self.colocate_with == "policy" and self.device == "cuda" else "none"


class RolloutRole(GuestEngineRole):
    """Workers that sample: one vLLM engine each."""


class TrainerRole(TrainerConfig, RoleResources):
    """Workers that train a model: one DeepSpeed rank each."""

    lora: Annotated[LoraConfig | None, refused("the checkpoint holds the weights that trained until then")] = None
    """Train low-rank adapters instead of the model's weights; null: train all weights. Engines load the adapters of
    each version, and a reference that is colocated with the policy is the same model without them. A reward model's or
    critic's head trains besides, whole."""

    @property
    def data_parallel_size(self) -> int:
        """Number of shares that the rows of a batch are divided into."""
        return max(1, self.workers // self.sequence_parallel_size)


class PolicyRole(PolicySettings, TrainerRole):
    """Workers that train the policy: one DeepSpeed rank each."""


class CriticRole(TrainerRole):
    """Workers that train the critic: one DeepSpeed rank each."""

    model: Annotated[ModelConfig | None, refused("the critic's weights are the checkpoint's; start another run")] = None
    """Pretrained model the critic starts from (a value head is added); null: the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run that train only the critic."""


class ReferenceRole(RoleResources):
    """The frozen model that the policy is kept close to."""

    model: Annotated[ModelConfig | None, _OTHER_REFERENCE] = None
    """Pretrained reference model; null: the model that training starts from."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens (padding included) in one forward pass of one worker."""
    shards: int = Field(default=1, ge=1)
    """Processes over which each worker divides its model, one for each of its `gpus`, for a model that one GPU cannot
    hold: every process keeps a part of each layer and gathers a whole layer only while it runs (ZeRO-3). They share the
    micro-batches. On the CPU each needs a core of `cpus`."""
    threads: int = Field(default=0, ge=0)
    """Compute threads (CPU only) of each process. 0: `cpus` divided by `shards`, at least one."""


class ScaledReferenceRole(ReferenceRole, ScaledRole):
    """The frozen model that the policy is kept close to."""


class ReferenceEngineRole(GuestEngineRole):
    """Workers that sample responses of the reference: one vLLM engine with its model each."""


class TaughtBy(TeacherPrompt):
    """What a teacher teaches, wherever its model is."""

    weight: float = Field(default=1.0, gt=0.0)
    """Weight of its loss. The losses of a sample's teachers are added, each with its weight."""
    sources: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the sources in `data.train` whose samples it teaches; null: all."""

    @field_validator("prompt")
    @classmethod
    def _names_fields(cls, prompt: str | None) -> str | None:
        checked_fields(prompt or "", TEACHER_FIELDS)
        return prompt


class TeacherRole(TaughtBy, TeacherSettings, ScaledReferenceRole):
    """A model that the policy learns from: frozen, with `colocate_with: policy` in its workers. There, without `model`,
    it is the policy itself before each step's updates."""

    kind: Literal["forward"] = "forward"
    """`forward`: workers that load the model and run it, as the reference's do; `engine`: a vLLM engine each;
    `endpoint`: a vLLM server elsewhere."""


class TeacherEngineRole(TaughtBy, GuestEngineRole):
    """A frozen model that the policy learns from, in workers with one vLLM engine each, which returns the log-probs of
    whole sequences."""

    row = "teacher_engine"
    kind: Literal["engine"]
    """A vLLM engine each."""
    model: ModelConfig
    """The teacher's model."""


class TeacherEndpointRole(TaughtBy, TeacherEndpointSettings, ScaledRole):
    """A frozen model that the policy learns from, behind an endpoint: a vLLM server that returns the log-probs of whole
    sequences. Its workers ask and load no model."""

    row = "teacher_endpoint"
    kind: Literal["endpoint"]
    """A vLLM server elsewhere."""


SequenceTeacherRole = TeacherEngineRole | TeacherEndpointRole
"""Teachers that return the log-probs of whole sequences."""
Teacher = TeacherRole | SequenceTeacherRole
DEFAULT_TEACHER = "forward"
"""Kind of a teacher that names none."""


def teacher_kind(role: Any) -> str:
    """The kind that a teacher's section names."""
    if isinstance(role, dict):
        return role.get("kind", DEFAULT_TEACHER)
    return role.kind if isinstance(role, Teacher) else DEFAULT_TEACHER


class RewardRole(RewardConfig, ScaledRole):
    """Workers that score responses with functions, a reward model or both."""


class EnvironmentRole(EnvironmentConfig, ScaledRole):
    """Workers that hold the episodes of an environment."""


def environment_role(name: str) -> str:
    """The role of an environment by its name: `environment`, or `environment.NAME`."""
    return f"environment.{name}" if name else "environment"


def environment_form(role: Any) -> str:
    """The form that `roles.environment` is written in: a map has a section that is no field of an environment."""
    fields = EnvironmentRole.model_fields
    is_map = isinstance(role, dict) and any(
        isinstance(one, dict | Frozen) for key, one in role.items() if key not in fields
    )
    return MAP if is_map else SECTION


class JudgeRole(EngineRole):
    """Workers that answer the reward function `judge`: one vLLM engine with a frozen model each."""

    model: Annotated[ModelConfig, EVALUATED_BY_SET, REWARDED]
    """The model, with a chat template."""
    max_tokens: Annotated[int, EVALUATED_BY_SET, REWARDED] = Field(default=512, ge=1)
    """Longest answer, in tokens. Question and answer must fit `max_model_len`."""
    temperature: Annotated[GreedyOrTemperature, EVALUATED_BY_SET, REWARDED] = 0.0
    """Softmax temperature; 0: greedy."""
    structured: Annotated[StructuredConfig | None, EVALUATED_BY_SET, REWARDED] = None
    """A form that every answer has, such as `regex: "Score: (10|[0-9])"` for a small model; null: any text."""
    renew_every: Annotated[int | None, UNCOUNTED] = Field(default=None, ge=1)
    """Steps after which the model that plays against the policy is replaced by the policy's checkpoint; null: the
    model stays."""


class Roles(Frozen):
    """The worker roles: a field for each."""

    def present(self) -> dict[str, RoleResources]:
        """The roles this spec has, by name; environments of a map by `environment.NAME`."""
        found: dict[str, RoleResources] = {}
        for name, role in self:
            sections: Any = {f"{name}.{key}": one for key, one in role.items()} if isinstance(role, dict) else {}
            found |= {name: role} if isinstance(role, RoleResources) else sections
        return found

    def scaled(self) -> dict[str, ScaledRole]:
        """The roles whose number of workers can change, by name: roles that are not colocated with another."""
        roles = self.present().items()
        return {name: role for name, role in roles if isinstance(role, ScaledRole) and role.colocate_with is None}

    def trainers(self) -> dict[str, TrainerRole]:
        return {name: role for name, role in self.present().items() if isinstance(role, TrainerRole)}


class RolesConfig(Roles):
    """The worker roles."""

    rollout: Annotated[RolloutRole, NONE, Consequences(of={"max_model_len": SAMPLED})]
    """Workers that sample: one vLLM engine each."""
    policy: Annotated[PolicyRole, NONE, RESHARDED]
    """Workers that train the policy."""
    critic: Annotated[CriticRole | None, NONE, RESHARDED, _OTHER_TRAINERS] = None
    """Workers that train the critic; only if the algorithm has one."""
    reference: Annotated[ScaledReferenceRole | None, NONE, OTHER_REFERENCE, SAMPLED] = None
    """The frozen reference; needed if `algorithm.kl.coef` is above 0."""
    reference_engine: Annotated[ReferenceEngineRole | None, Consequences(resume=ALLOWED), SAMPLED] = None
    """Workers that sample the reference's responses, with which `xpo` compares the policy's."""
    teacher: Annotated[
        dict[
            Name,
            Annotated[
                Annotated[TeacherRole, Tag(DEFAULT_TEACHER)]
                | Annotated[TeacherEngineRole, Tag("engine")]
                | Annotated[TeacherEndpointRole, Tag("endpoint")],
                Discriminator(teacher_kind),
            ],
        ]
        | None,
        NONE,
        OTHER_REFERENCE,
        SAMPLED,
    ] = Field(default=None, min_length=1)
    """Models that the policy learns from, by name (`{math: {...}, code: {...}}`), if it learns from more than
    the reference (`algorithm.distill`, `distill`, `gkd`); null: the reference is the teacher."""
    reward: Annotated[RewardRole, Consequences(resume=ALLOWED), SAMPLED]
    """Workers that score responses."""
    environment: Annotated[
        Annotated[
            Annotated[EnvironmentRole, Tag(SECTION)]
            | Annotated[dict[Name, EnvironmentRole], Field(min_length=1), Tag(MAP), EVALUATED_BY_SET],
            Discriminator(environment_form),
        ]
        | None,
        NONE,
        SAMPLED,
        EVALUATED_IF_SET,
    ] = None
    """The environment that the policy acts in over several turns, or a map of named environments (`{tools: {...},
    games: {...}}`): sources in `data.train` and sets in `data.eval` select one by name; null: a sample is one response
    to its prompt."""
    judge: Annotated[JudgeRole | None, Consequences(resume=ALLOWED), SAMPLED, EVALUATED_BY_SET] = None
    """A frozen language model that scores responses for the reward function `judge`, or plays against the policy
    (`roles.environment.players`); null: it has an endpoint, or is not used."""

    def environments(self) -> dict[str, EnvironmentRole]:
        """The environments by name: empty for one without a name."""
        role = self.environment
        return role if isinstance(role, dict) else {} if role is None else {"": role}

    def engines(self) -> dict[str, EngineRole]:
        """The roles whose workers are engines, by name."""
        return {name: role for name, role in self.present().items() if isinstance(role, EngineRole)}

    def guests(self) -> dict[str, GuestEngineRole]:
        """The roles whose engines are on the policy's GPUs, by name."""
        engines = self.engines().items()
        return {n: e for n, e in engines if isinstance(e, GuestEngineRole) and e.colocate_with == "policy"}

    def sleepers(self) -> tuple[str, ...]:
        """The roles whose engines sleep while the policy trains."""
        return tuple(name for name, role in self.guests().items() if role.resolved_sleep != "none")

    def teachers(self, source: str | None = None) -> dict[str, Teacher]:
        """The teachers by the name of their role, or those of a source's samples (an empty name is the only source)."""
        found = {f"teacher.{name}": role for name, role in (self.teacher or {}).items()}
        return {n: t for n, t in found.items() if source is None or t.sources is None or source in t.sources}

    @property
    def judge_plays(self) -> bool:
        """Whether the judge's model plays as a player of a game."""
        return any(environment.has_opponent for environment in self.environments().values())

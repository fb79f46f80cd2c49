"""The table of roles: one row for each class of worker, plain data and functions of the spec.

The launcher, the capacity plan, the watch of processes, `troupe why` and the replay read the rows. Worker classes are
named by their path (`module:Class`), so that the table imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from troupe.orchestrator.roles import settings
from troupe.orchestrator.roles.names import section_of
from troupe.orchestrator.roles.settings import WorkerSettings
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.roles import RoleName
from troupe.workers.contract import roles

_GROUPS = "troupe.orchestrator.cluster.worker_group"
_POOLS = "troupe.orchestrator.runs.pools"
_MEMORY = "troupe.orchestrator.plan.memory"


@dataclass(frozen=True)
class Restarts:
    """The number of lost workers of a role that a run replaces."""

    name: str
    """The number is the field `{name}_restarts` of `failures`."""
    limit: Callable[[Any], int]
    """Reads this field."""


@dataclass(frozen=True)
class Role:
    """One row: a class of workers, and how the rest of the orchestrator treats it."""

    kind: str
    worker: str
    protocol: type[Any]
    """Protocol of its workers' calls."""
    settings: Callable[[Any], WorkerSettings | Mapping[str, WorkerSettings] | None]
    """Settings of the workers of a spec, by `ROLE.NAME` if the section may be a map; None if the spec has no
    workers of this role."""
    memory: str
    """Path of the function that estimates the memory of one worker (`MemoryOf`)."""
    name: RoleName | None = None
    """Section of `roles` that has its workers, or None for the section named as the row."""
    restarts: Restarts | None = None
    """The number of lost workers that are replaced, or None to replace none."""
    pool: str | None = None
    """Path of the function that makes the pool of the workers, each of which can be replaced, added and removed during
    the run (see `runs/pools.py`), or None if they start once and stay."""
    group: str | None = None
    """Path of the class of group that calls the workers together, or None if each is called alone."""
    trains: bool = False
    """Whether the workers are ranks that train one model together."""
    concurrent: bool = False
    """Whether a worker runs several calls at once."""
    engine: bool = False
    """Whether a worker is a vLLM engine, which cannot serve when a process that it started is stopped."""
    quantized: bool = False
    """Whether a worker uses quantized weights as they are."""
    behind: str | None = None
    """Method of other workers that calls these workers without the driver."""
    samples: bool = False
    """Whether the workers sample what evaluation on prompts scores."""
    evaluates: bool = False
    """Whether evaluation on prompts needs the role."""
    audited: bool = False
    """Whether an audit of sampler and trainer needs the role."""

    @property
    def section(self) -> RoleName:
        return self.name or self.kind  # pyright: ignore[reportReturnType]


_TRAINER_RESTARTS = Restarts("trainer", lambda failures: failures.trainer_restarts)

_REFERENCE = Role(
    kind="reference",
    worker="troupe.workers.reference:ReferenceWorker",
    protocol=roles.Reference,
    settings=settings.of_scorers,
    memory=f"{_MEMORY}:of_scorer",
    restarts=Restarts("reference", lambda failures: failures.reference_restarts),
    pool=f"{_POOLS}:replica_pool",
    group=f"{_GROUPS}:ReferenceGroup",
)

ROLES: dict[str, Role] = {
    row.kind: row
    for row in (
        Role(
            kind="rollout",
            worker="troupe.workers.rollout:RolloutWorker",
            protocol=roles.RolloutEngine,
            settings=settings.of_rollout,
            memory=f"{_MEMORY}:of_engine",
            restarts=Restarts("engine", lambda failures: failures.engine_restarts),
            pool=f"{_POOLS}:engine_pool",
            concurrent=True,
            engine=True,
            samples=True,
            evaluates=True,
            audited=True,
        ),
        Role(
            kind="environment",
            worker="troupe.workers.environment:EnvironmentWorker",
            protocol=roles.EnvironmentServer,
            settings=settings.of_environment,
            memory=f"{_MEMORY}:of_process",
            restarts=Restarts("environment", lambda failures: failures.environment_restarts),
            pool=f"{_POOLS}:environment_pool",
            concurrent=True,
            behind=roles.RolloutEngine.generate.__name__,
            evaluates=True,
            audited=True,
        ),
        Role(
            kind="judge",
            worker="troupe.workers.judge:JudgeWorker",
            protocol=roles.JudgeEngine,
            settings=settings.of_judge,
            memory=f"{_MEMORY}:of_judge",
            restarts=Restarts("judge", lambda failures: failures.judge_restarts),
            pool=f"{_POOLS}:judge_pool",
            concurrent=True,
            engine=True,
            quantized=True,
            behind=roles.Reward.score_groups.__name__,
            evaluates=True,
        ),
        Role(
            kind="reward",
            worker="troupe.workers.reward:RewardWorker",
            protocol=roles.Reward,
            settings=settings.of_reward,
            memory=f"{_MEMORY}:of_reward",
            restarts=Restarts("reward", lambda failures: failures.reward_restarts),
            pool=f"{_POOLS}:reward_pool",
            evaluates=True,
        ),
        _REFERENCE,
        replace(
            _REFERENCE,
            kind="reference_engine",
            worker="troupe.workers.reference_engine:ReferenceEngine",
            protocol=roles.ReferenceSampler,
            settings=settings.of_reference_engine,
            memory=f"{_MEMORY}:of_reference_engine",
            pool=f"{_POOLS}:reference_engine_pool",
            group=None,
            concurrent=True,
            engine=True,
            behind=roles.RolloutEngine.generate.__name__,
        ),
        replace(_REFERENCE, kind="teacher"),
        replace(
            _REFERENCE,
            kind="teacher_engine",
            name="teacher",
            worker="troupe.workers.teacher:TeacherEngine",
            protocol=roles.EngineTeacher,
            settings=settings.of_teacher_engines,
            memory=f"{_MEMORY}:of_teacher_engine",
            concurrent=True,
            engine=True,
        ),
        replace(
            _REFERENCE,
            kind="teacher_endpoint",
            name="teacher",
            worker="troupe.workers.teacher:TeacherEndpoint",
            settings=settings.of_teacher_endpoints,
            memory=f"{_MEMORY}:of_process",
            concurrent=True,
        ),
        Role(
            kind="policy",
            worker="troupe.workers.policy:PolicyWorker",
            protocol=roles.Policy,
            settings=settings.of_policy,
            memory=f"{_MEMORY}:of_policy",
            restarts=_TRAINER_RESTARTS,
            group=f"{_GROUPS}:PolicyGroup",
            trains=True,
            audited=True,
        ),
        Role(
            kind="critic",
            worker="troupe.workers.critic:CriticWorker",
            protocol=roles.Critic,
            settings=settings.of_critic,
            memory=f"{_MEMORY}:of_critic",
            restarts=_TRAINER_RESTARTS,
            group=f"{_GROUPS}:CriticGroup",
            trains=True,
        ),
        Role(
            kind="example_policy",
            worker="troupe.workers.offline:ExamplePolicyWorker",
            protocol=roles.ExampleTrainer,
            settings=settings.of_offline,
            memory=f"{_MEMORY}:of_offline_trainer",
            restarts=_TRAINER_RESTARTS,
            name="policy",
            group=f"{_GROUPS}:ExampleGroup",
            trains=True,
        ),
        Role(
            kind="reward_trainer",
            worker="troupe.workers.offline:RewardTrainer",
            protocol=roles.ExampleTrainer,
            settings=settings.of_offline,
            memory=f"{_MEMORY}:of_offline_trainer",
            restarts=_TRAINER_RESTARTS,
            name="policy",
            group=f"{_GROUPS}:ExampleGroup",
            trains=True,
        ),
    )
}

NAMES: tuple[RoleName, ...] = tuple(dict.fromkeys(row.section for row in ROLES.values()))
"""The roles that a spec can have, in the order of the data."""
TRAINERS: tuple[RoleName, ...] = tuple(dict.fromkeys(row.section for row in ROLES.values() if row.trains))
"""The roles whose workers train a model."""
SAMPLERS: tuple[RoleName, ...] = tuple(dict.fromkeys(row.section for row in ROLES.values() if row.samples))
"""The roles whose workers sample what is trained on."""
TRAINED = (*TRAINERS, "reward_model")
"""Prefixes of the trainers' metrics: a reward model's are not named after its role."""


def named(role: Callable[[Role], bool]) -> frozenset[str]:
    """Names of the roles whose row matches."""
    return frozenset(row.section for row in ROLES.values() if role(row))


def trainer_of(spec: RunSpec) -> str:
    """Row of the workers that train the model."""
    if spec.rollouts is not None:
        return "policy"
    return "reward_trainer" if spec.trains == "reward_model" else "example_policy"


def row_of(spec: RunSpec, role: str) -> Role:
    """The row of a role of this spec, by its name: `environment.NAME` has the row of `environment`."""
    if role == "policy":
        return ROLES[trainer_of(spec)]
    section = spec.roles.present().get(role)
    return ROLES[section_of(role) if section is None or section.row is None else section.row]


def settings_of(spec: RunSpec, role: str) -> WorkerSettings:
    """Settings with which each worker of a role is started. Raises KeyError if the spec has no workers of this role."""
    found = row_of(spec, role).settings(spec) if role in spec.roles.present() else None
    if isinstance(found, Mapping):
        found = found.get(role)
    if found is None:
        raise KeyError(role)
    return found

"""The spec: one frozen description of a run, read from YAML, and what each worker is told by it.

A spec that loads can work as far as the file itself can say: combinations that cannot are refused with the path of
the field (`orchestrator/spec_checks.py`). What the machine must have besides is for `orchestrator/spec_files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from orchestrator import algorithms, spec_checks, spec_yaml
from orchestrator.algorithms import AlgorithmConfig
from orchestrator.spec_errors import PROBLEMS, Problem, SpecError, from_validation
from orchestrator.spec_sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FailureConfig,
    OutputConfig,
    RolesConfig,
    ScheduleConfig,
    WeightSyncConfig,
)
from workers.config import (
    CriticConfig,
    EngineConfig,
    Frozen,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
    TransferBackend,
)

__all__ = ["Problem", "Spec", "SpecError", "load_spec", "parse_spec"]

Device = Literal["cpu", "cuda"]


class Spec(Frozen):
    """One run."""

    name: str = Field(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Name of the run and of its folder: lowercase letters, digits and `-`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything random: order of prompts, sampling, initial value head."""
    model: ModelConfig
    """The model that is trained."""
    roles: RolesConfig
    """Who takes part, with how many workers and how many resources."""
    algorithm: AlgorithmConfig
    """How the policy is improved."""
    schedule: ScheduleConfig
    """How long the run is, how a step is cut, and how long anything may take."""
    sampling: SamplingConfig = SamplingConfig()
    """How responses are sampled for training."""
    data: DataConfig
    """Where prompts come from."""
    evaluation: EvaluationConfig | None = None
    """When and how the policy is evaluated; left out: never."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights reach the engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run's state is saved."""
    failures: FailureConfig = FailureConfig()
    """What is borne, and when the run stops."""
    output: OutputConfig = OutputConfig()
    """What the run writes."""

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        problems = spec_checks.find_problems(self)
        if problems:
            text = "; ".join(f"{path}: {message}" for path, message in problems)
            raise PydanticCustomError(PROBLEMS, "{text}", {"text": text, "problems": problems})
        return self

    @property
    def group_size(self) -> int:
        """Samples per prompt."""
        return algorithms.group_size(self.algorithm)

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term, wherever it stands."""
        return algorithms.kl_coef(self.algorithm)

    @property
    def samples_per_step(self) -> int:
        """Samples in a step's batch, when none fails."""
        return self.schedule.prompts_per_step * self.group_size

    @property
    def critic_updates(self) -> int:
        """Optimizer updates of the critic over the run."""
        return self.schedule.steps * self.schedule.epochs * self.schedule.minibatches

    @property
    def policy_updates(self) -> int:
        """Optimizer updates of the policy over the run (the critic's warm-up has none)."""
        warmup = self.roles.critic.warmup_steps if self.roles.critic is not None else 0
        return max(0, self.schedule.steps - warmup) * self.schedule.epochs * self.schedule.minibatches

    @property
    def device(self) -> Device:
        """Where the policy and the engines run."""
        return "cuda" if self.roles.policy.gpus > 0 or self.roles.rollout.gpus > 0 else "cpu"

    @property
    def reference_in_policy(self) -> bool:
        """Whether the reference lives in the policy's workers."""
        return self.roles.reference is not None and self.roles.reference.colocate_with == "policy"

    @property
    def run_folder(self) -> Path:
        """Where the run is written."""
        return Path(self.output.folder) / self.name

    def resolved_backend(self) -> TransferBackend:
        """The weight-transfer back-end, `auto` resolved."""
        if self.weight_sync.backend != "auto":
            return self.weight_sync.backend
        if self.device == "cpu":
            return "shm"
        return "ipc" if self.roles.rollout.colocate_with == "policy" else "nccl"

    def rollout_config(self) -> RolloutConfig:
        """What every rollout worker is told."""
        role = self.roles.rollout
        return RolloutConfig(
            model=self.model,
            engine=EngineConfig(**_part(role, EngineConfig, threads=_threads(role.threads, role.cpus))),
            sampling=self.sampling,
            seed=self.seed,
            transfer_backend=self.resolved_backend(),
            device=self.device,
        )

    def policy_config(self) -> PolicyConfig:
        """What every policy rank is told."""
        role = self.roles.policy
        return PolicyConfig(
            model=self.model,
            trainer=TrainerConfig(**_part(role, TrainerConfig, threads=_threads(role.threads, role.cpus))),
            loss=algorithms.policy_loss(self.algorithm),
            advantage=algorithms.advantage(self.algorithm),
            sampling=self.sampling,
            ptx_coef=self.algorithm.ptx_coef,
            share_prompts=role.share_prompts,
            run_id=self.name,
            reference_model=self._reference_model() if self.reference_in_policy else None,
            total_updates=self.policy_updates,
            seed=self.seed,
            device=self.device,
            transfer_backend=self.resolved_backend(),
        )

    def critic_config(self) -> CriticConfig | None:
        """What every critic rank is told; None without a critic."""
        role, loss = self.roles.critic, algorithms.critic_loss(self.algorithm)
        if role is None or loss is None:
            return None
        return CriticConfig(
            model=role.model or self.model,
            trainer=TrainerConfig(**_part(role, TrainerConfig, threads=_threads(role.threads, role.cpus))),
            loss=loss,
            total_updates=self.critic_updates,
            seed=self.seed,
            device=_device(role.gpus),
        )

    def reference_config(self) -> ReferenceConfig | None:
        """What every reference worker is told; None without a reference or where it lives in the policy's workers."""
        role = self.roles.reference
        if role is None or self.reference_in_policy:
            return None
        return ReferenceConfig(
            model=self._reference_model(),
            temperature=self.sampling.temperature,
            micro_batch_tokens=role.micro_batch_tokens,
            threads=_threads(role.threads, role.cpus),
            device=_device(role.gpus),
        )

    def reward_config(self) -> RewardConfig:
        """What every reward worker is told."""
        role = self.roles.reward
        return RewardConfig(**_part(role, RewardConfig, threads=_threads(role.threads, role.cpus)))

    def _reference_model(self) -> ModelConfig:
        role = self.roles.reference
        return role.model if role is not None and role.model is not None else self.model


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a spec of a run with rollouts. Specs of any kind, and chains: `orchestrator/spec_chain.py`.

    :param overrides: `field.path=value` each (`roles.rollout.workers=2`); the value is YAML
    Raises SpecError with one line for every problem found.
    """
    return parse_spec(spec_yaml.override(spec_yaml.read_file(path), list(overrides)))


def parse_spec(document: spec_yaml.Document) -> Spec:
    """Validate a document. Raises SpecError."""
    try:
        # JSON mode is the strict one that takes lists for tuples: no text is read as a number, no 1 as true.
        return Spec.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        raise SpecError(from_validation(error, Spec, document.data, document.source)) from None


def _part(role: Frozen, model: type[Frozen], **changes: Any) -> dict[str, Any]:
    """The fields of `model` that a role section holds."""
    values = dict(role)
    return {name: values[name] for name in model.model_fields} | changes


def _threads(threads: int, cpus: float) -> int:
    return threads or max(1, int(cpus))


def _device(gpus: float) -> Device:
    return "cuda" if gpus > 0 else "cpu"

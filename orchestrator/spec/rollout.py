"""The spec of a run on rollouts.

Constructing a spec checks its fields. Loading one (`orchestrator/spec/load.py`) also refuses combinations of fields
that cannot work. What follows from the fields is in `orchestrator/spec/derived/`; the configuration of each worker is
in `orchestrator/roles/settings.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from troupe.orchestrator.algorithms import section
from troupe.orchestrator.algorithms.section import AlgorithmConfig
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.roles import RolesConfig
from troupe.orchestrator.spec.sections import (
    OTHER_EVALUATIONS,
    AuditConfig,
    DataConfig,
    EvaluationConfig,
    FailureConfig,
    OutputConfig,
    RolloutCheckpointConfig,
    ScheduleConfig,
    WeightSyncConfig,
)
from troupe.workers.contract.config import SamplingConfig
from troupe.workers.contract.config_base import Device
from troupe.workers.contract.consequences import NEXT_STEP, NONE, NOT_REWARDED, NOT_SAMPLED, SAMPLED


class RolloutSpec(RunSpec, frozen=True):
    """One run that samples its own responses."""

    roles: RolesConfig
    """The worker roles, with their number of workers and their resources."""
    algorithm: Annotated[AlgorithmConfig, NONE, NEXT_STEP, SAMPLED]
    """How the policy is trained."""
    schedule: Annotated[ScheduleConfig, NONE]
    """Length of the run, division of a step, and timeouts."""
    sampling: Annotated[SamplingConfig, NEXT_STEP, NOT_REWARDED, SAMPLED] = SamplingConfig()
    """How responses are sampled for training."""
    data: DataConfig
    """Sources of prompts."""
    evaluation: Annotated[EvaluationConfig | None, OTHER_EVALUATIONS, NOT_REWARDED, NOT_SAMPLED] = None
    """When and how the policy is evaluated; left out: never."""
    weight_sync: Annotated[WeightSyncConfig, NONE] = WeightSyncConfig()
    """How new weights reach the engines."""
    audit: Annotated[AuditConfig, NONE] = AuditConfig()
    """Whether sampler and trainer are compared before the first step."""
    checkpoint: Annotated[RolloutCheckpointConfig, NONE] = RolloutCheckpointConfig()
    """When the run's state is saved."""
    failures: Annotated[FailureConfig, NONE] = FailureConfig()
    """Which failures are tolerated, and when the run stops."""
    output: Annotated[OutputConfig, NONE] = OutputConfig()
    """Outputs of the run."""

    @property
    def rollouts(self) -> RolloutSpec:
        return self

    @property
    def trains(self) -> Literal["policy"]:
        """Kind of model that the run writes."""
        return "policy"

    @property
    def device(self) -> Device:
        """Device that the policy and the engines run on."""
        return "cuda" if self.roles.policy.gpus > 0 or self.roles.rollout.gpus > 0 else "cpu"

    @property
    def group_size(self) -> int:
        """Samples per prompt, unless its source sets another number."""
        return section.group_size(self.algorithm)

    @property
    def group_sizes(self) -> frozenset[int]:
        """Samples per prompt, of all sources."""
        own = frozenset(source.group_size or self.group_size for source in self.data.mixture)
        return own or frozenset({self.group_size})

    @property
    def samples_per_step(self) -> int:
        """Samples in a step's batch, when none fails; the most if sources differ in their group sizes."""
        return self.schedule.prompts_per_step * max(self.group_sizes)

    @property
    def sequences_per_step(self) -> int:
        """Sequences that a step trains on: its samples, and the reference's that they are compared with."""
        return self.samples_per_step * (2 if section.advantage(self.algorithm).compares_reference else 1)

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term, in the loss or in the reward."""
        return section.kl_coef(self.algorithm)

    @property
    def critic_warmup(self) -> int:
        """Steps at the start of the run in which only the critic is updated."""
        return self.roles.critic.warmup_steps if self.roles.critic is not None else 0

    def updates_of(self, role: str) -> int:
        """Optimizer updates of a role that trains, over the run: the critic's warm-up has none of the policy."""
        steps = self.schedule.steps - (self.critic_warmup if role == "policy" else 0)
        return max(0, steps) * self.schedule.updates_per_step

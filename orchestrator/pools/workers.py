"""The workers of a run, by role, once they are started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from troupe.orchestrator.cluster.ray_cluster import ActorWorker
from troupe.orchestrator.cluster.worker_group import CriticGroup, ExampleGroup, PolicyGroup, ReferenceGroup, WorkerGroup
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.pools.engine import Engine
from troupe.workers.contract import roles

GroupT = TypeVar("GroupT", bound=WorkerGroup[Any])
Started = WorkerGroup[Any] | Sequence[Any]
"""The workers of a role: a group, or each alone."""


@dataclass(frozen=True)
class Workers:
    """Every worker of a run, started."""

    by_role: Mapping[str, Started]

    def group(self, role: str, kind: type[GroupT]) -> GroupT | None:
        """The workers of a role that are called together; None without workers of this kind."""
        found = self.by_role.get(role)
        return found if isinstance(found, kind) else None

    def each(self, role: str) -> tuple[Any, ...]:
        """The workers of a role one by one; empty without workers of the role."""
        found = self.by_role.get(role, ())
        return tuple(found.workers if isinstance(found, WorkerGroup) else found)

    @property
    def policy(self) -> PolicyGroup | None:
        """The policy, in runs on rollouts that train it."""
        return self.group("policy", PolicyGroup)

    def require_policy(self) -> PolicyGroup:
        """The policy. Raises TroupeError if it is not started."""
        policy = self.policy
        if policy is None:
            raise TroupeError("the run has no policy workers")
        return policy

    @property
    def examples(self) -> ExampleGroup | None:
        """The trained model, in runs on offline data."""
        return self.group("policy", ExampleGroup)

    @property
    def critic(self) -> CriticGroup | None:
        return self.group("critic", CriticGroup)

    def require_critic(self) -> CriticGroup:
        """The critic. Raises TroupeError if it is not started."""
        critic = self.critic
        if critic is None:
            raise TroupeError("the run has no critic workers")
        return critic

    @property
    def reference(self) -> ReferenceGroup | None:
        """The frozen reference, unless it lives in the policy's workers."""
        return self.group("reference", ReferenceGroup)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.each("rollout")

    def with_engines(self, engines: Sequence[Engine]) -> Workers:
        return Workers({**self.by_role, "rollout": engines})

    @property
    def reward(self) -> tuple[ActorWorker[roles.Reward], ...]:
        return self.each("reward")

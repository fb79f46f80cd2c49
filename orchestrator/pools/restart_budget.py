"""The number of lost workers of a role that a run replaces before it gives up."""

from __future__ import annotations

from troupe.orchestrator.roles.table import row_of
from troupe.orchestrator.spec.base import RunSpec


class RestartBudget:
    """Restarts of one role. Steps that are trained without a loss give used restarts back."""

    def __init__(self, role: str, limit: int, steps_per_restart: int = 0) -> None:
        """Nothing is used yet.

        Args:
            role: `failures.{role}_restarts` is the limit.
            limit: Restarts that can be in use at once.
            steps_per_restart: Steps without a lost worker after which one restart is refunded, or 0 for never.
        """
        self.role = role
        self._limit = limit
        self._steps_per_restart = steps_per_restart
        self._steps = 0
        self.used = 0
        """Restarts in use."""
        self.total = 0
        """Restarts in the whole run."""

    @classmethod
    def of_role(cls, spec: RunSpec, role: str) -> RestartBudget:
        """The restarts that a spec allows a role."""
        restarts, failures = row_of(spec, role).restarts, spec.failures
        if restarts is None:
            return cls(role, 0)
        return cls(restarts.name, restarts.limit(failures), failures.steps_per_restart)

    def take(self) -> bool:
        """Uses one restart; False if all are in use."""
        if self.used >= self._limit:
            return False
        self.used += 1
        self.total += 1
        self._steps = 0
        return True

    def after_step(self) -> None:
        """Counts a trained step."""
        self._steps += 1
        if self.used and self._steps_per_restart and self._steps >= self._steps_per_restart:
            self.used -= 1
            self._steps = 0

    def __str__(self) -> str:
        return f"{self.used} of {self._limit} restarts used: failures.{self.role}_restarts"

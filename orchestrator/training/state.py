"""State of the controller from step to step besides version and ledger; checkpoints contain it."""

from __future__ import annotations

from collections.abc import Mapping

from troupe.orchestrator.algorithms.table import KlPenalty
from troupe.orchestrator.spec.sections import AlarmConfig
from troupe.workers.contract.advantage_state import Moments
from troupe.workers.contract.config import Frozen

_TOO_FAR, _STEP = 1.5, 2.0
"""The penalty's coefficient doubles above 1.5 times the target and halves below the target / 1.5."""


class ControllerState(Frozen):
    """An immutable value; every step creates the next one."""

    kl_old_coef: float = 0.0
    """Coefficient of the penalty on KL(old || new)."""
    rewards: Moments = Moments()
    """Moments of the mean rewards of the steps so far (alarm)."""

    def after_updates(self, divergence: float, penalty: KlPenalty) -> ControllerState:
        """The state with the KL penalty's coefficient adapted after a batch (arXiv 1707.06347, sec. 4).

        Args:
            divergence: KL(old || new) per token after the updates of the batch, in nats.
            penalty: The penalty with its target.
        """
        coef = self.kl_old_coef
        if divergence > _TOO_FAR * penalty.target:
            coef *= _STEP
        elif divergence < penalty.target / _TOO_FAR:
            coef /= _STEP
        return self.model_copy(update={"kl_old_coef": coef})

    def check_alarm(self, metrics: Mapping[str, float], alarm: AlarmConfig) -> tuple[ControllerState, list[str]]:
        """Checks a step's metrics for signs of reward hacking.

        Returns:
            The state with this step's reward, and one message for every limit that is exceeded while the reward is
            above its mean so far.
        """
        reward = metrics["reward/mean"]
        rising = self.rewards.count > 0 and reward > self.rewards.mean
        limits = (
            ("the KL divergence from the reference", "kl_ref", alarm.kl),
            ("repetition", "repetition", alarm.repetition),
            ("the response length", "response_tokens/mean", alarm.response_tokens),
        )
        reasons = [
            f"{what} is {metrics[name]:.3g}, above {limit:g}"
            for what, name, limit in limits
            if rising and limit is not None and metrics.get(name, 0.0) > limit
        ]
        return self.model_copy(update={"rewards": self.rewards.seen([reward])}), reasons

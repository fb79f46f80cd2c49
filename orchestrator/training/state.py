"""What the controller remembers from step to step besides versions and books; a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.algorithm_table import KlPenalty
from orchestrator.spec_sections import AlarmConfig
from workers.advantage_state import Moments
from workers.config import Frozen

_TOO_FAR, _STEP = 1.5, 2.0
"""The penalty's coefficient is doubled above 1.5 times the target and halved below 1 / 1.5 of it."""


class TrainMemory(Frozen):
    """A value: every step makes the next one."""

    kl_old_coef: float = 0.0
    """Coefficient of the penalty on KL(old || new)."""
    rewards: Moments = Moments()
    """Mean rewards of the steps so far (alarm)."""

    def after_updates(self, divergence: float, penalty: KlPenalty) -> TrainMemory:
        """With the coefficient adapted to the KL(old || new) a batch's updates led to (arXiv 1707.06347, sec. 4)."""
        coef = self.kl_old_coef
        if divergence > _TOO_FAR * penalty.target:
            coef *= _STEP
        elif divergence < penalty.target / _TOO_FAR:
            coef /= _STEP
        return self.model_copy(update={"kl_old_coef": coef})

    def watched(self, metrics: Mapping[str, float], alarm: AlarmConfig) -> tuple[TrainMemory, list[str]]:
        """(memory with this step's reward, what is out of bounds while the reward is above its mean so far)."""
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

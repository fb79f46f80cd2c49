"""The alarm of a run: the reward rises while text or policy degenerate, a sign of reward hacking."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from troupe.orchestrator.spec.sections import AlarmConfig
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.training.parts import Metrics, RunPart, UpdatedStep
from troupe.workers.contract.advantage_state import Moments

logger = logging.getLogger(__name__)


class Alarm(RunPart):
    """Warns of reward hacking, and may end the run (`failures.alarm`). The run is saved as at any other stop."""

    name = "alarm"
    state: Moments
    """Moments of the mean rewards of the steps so far."""

    def __init__(self, config: AlarmConfig | None, events: EventLog) -> None:
        """`config`: the alarm's settings, or None for no alarm."""
        self._config = config
        self._events = events
        self.state = Moments()
        self.stops = False
        """Whether it ends the run."""

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """Whether the alarm is raised."""
        if self._config is None:
            return {}
        reasons = signs(metrics, self.state, self._config)
        self.state = self.state.seen([metrics["reward/mean"]])
        if reasons:
            self.stops = self.stops or self._config.action == "stop"
            detail = f"step {step.number}: the reward rises while {' and '.join(reasons)} (failures.alarm)"
            logger.warning("%s", detail)
            self._events.record("alarm", detail=detail)
        return {"alarm/reward_hacking": float(bool(reasons))}


def signs(metrics: Mapping[str, float], rewards: Moments, alarm: AlarmConfig) -> list[str]:
    """Signs of reward hacking in a step's metrics.

    Returns:
        One message for every limit that is exceeded while the reward is above the mean of `rewards`, those before it.
    """
    rising = rewards.count > 0 and metrics["reward/mean"] > rewards.mean
    limits = (
        ("the KL divergence from the reference", "kl_ref", alarm.kl),
        ("repetition", "repetition", alarm.repetition),
        ("the response length", "response_tokens/mean", alarm.response_tokens),
    )
    return [
        f"{what} is {metrics[name]:.3g}, above {limit:g}"
        for what, name, limit in limits
        if rising and limit is not None and metrics.get(name, 0.0) > limit
    ]

"""Steps of a response, for process rewards (`roles.reward.functions`)."""

from troupe.workers.rewards.steps import Steps

__all__ = ["Steps"]

"""Environments: what the policy acts in over several turns. A user's own derive from `Environment`."""

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row

__all__ = ["Environment", "Message", "Observation", "Row"]

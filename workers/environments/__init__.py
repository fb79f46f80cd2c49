"""Environments: what the policy acts in over several turns. A user's own derive from `Environment`."""

from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.environments.base import Environment

__all__ = ["Environment", "Message", "Observation", "Row"]

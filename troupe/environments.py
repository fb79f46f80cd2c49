"""Base class and messages of environments (`roles.environment`), and built-in ones to derive from."""

from troupe.workers.agents.environments import Environment, Message, Observation, Row
from troupe.workers.agents.environments.basic import GuessNumber, Retry, SingleTurn

__all__ = ["Environment", "GuessNumber", "Message", "Observation", "Retry", "Row", "SingleTurn"]

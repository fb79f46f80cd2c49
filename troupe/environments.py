"""Base class and messages of environments (`roles.environment`), and built-in ones to derive from."""

from troupe.workers.agents.environments import Environment, Message, Observation, Row
from troupe.workers.agents.environments.guess_number import GuessNumber
from troupe.workers.agents.environments.retry import Retry
from troupe.workers.agents.environments.single_turn import SingleTurn

__all__ = ["Environment", "GuessNumber", "Message", "Observation", "Retry", "Row", "SingleTurn"]

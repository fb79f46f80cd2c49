"""Base class and messages of environments (`roles.environment`), and built-in ones to derive from."""

from troupe.workers.environments import Environment, Message, Observation, Row
from troupe.workers.environments.guess_number import GuessNumber
from troupe.workers.environments.retry import Retry
from troupe.workers.environments.single_turn import SingleTurn

__all__ = ["Environment", "GuessNumber", "Message", "Observation", "Retry", "Row", "SingleTurn"]

"""Base class and messages of environments (`roles.environment`)."""

from troupe.workers.environments import Environment, Message, Observation, Row

__all__ = ["Environment", "Message", "Observation", "Row"]

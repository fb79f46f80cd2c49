"""Built-in reward functions, to be called from custom ones, and steps of a response for process rewards."""

from troupe.workers.rewards.functions import exact_match, last_number, length, letter_share, overlong, regex
from troupe.workers.rewards.results import Steps

__all__ = ["Steps", "exact_match", "last_number", "length", "letter_share", "overlong", "regex"]

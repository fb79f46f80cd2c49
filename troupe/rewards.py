"""Built-in reward functions, to be called from custom ones, and what a function may return instead of a number: steps
of a response, for process rewards, and feedback."""

from troupe.workers.contract.rewards import Feedback
from troupe.workers.rewards.functions import exact_match, last_number, length, letter_share, overlong, regex
from troupe.workers.rewards.results import Steps

__all__ = ["Feedback", "Steps", "exact_match", "last_number", "length", "letter_share", "overlong", "regex"]

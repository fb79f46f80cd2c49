"""Reward functions inside environments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from troupe.workers.contract.environments import Row
from troupe.workers.rewards.loading import load
from troupe.workers.rewards.results import parse_value


class RewardFunction:
    """A reward function, as in `roles.reward`, for the text of one turn."""

    def __init__(self, function: str, args: Mapping[str, Any] | None) -> None:
        """Load it. Raises ValueError."""
        self._args = dict(args or {})
        self._function = load(function, self._args)

    async def value(self, text: str, row: Row) -> float:
        """The value of a text. Raises ValueError if the function returns no number, and whatever it raises."""
        returned = self._function(text, row.answer, dict(row.metadata), **self._args)
        reply = parse_value(await returned if inspect.isawaitable(returned) else returned, text)
        if "failure" in reply:
            raise ValueError(reply["failure"])
        return float(reply["value"])

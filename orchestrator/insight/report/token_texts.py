"""Texts of tokens by id, from the run's tokenizer, once for each id."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from troupe.workers.isolation.probe import ProbeFailed, ask

_TIMEOUT_S = 60.0


class TokenTexts:
    """The vocabulary of a run, as far as its samples use it."""

    def __init__(self, model: Mapping[str, Any], retry_s: float = math.inf) -> None:
        """After a failed question none is asked for a while.

        Args:
            model: The section of the spec.
            retry_s: How long, in seconds; never again by default.
        """
        self._model = dict(model)
        self._retry_s = retry_s
        self._ask_at = 0.0 if model else math.inf
        """No question before this, by the monotonic clock."""
        self._known: dict[int, str] = {}
        self.problem = "" if model else "the run has no spec.yaml with a model"
        """Why there are no texts; empty if there are."""

    def learn(self, ids: Iterable[int]) -> None:
        """Reads the texts of ids that are not known yet; sets `problem` if that fails, else clears it."""
        wanted = sorted(set(ids) - self._known.keys())
        if not wanted or time.monotonic() < self._ask_at:
            return
        try:
            texts = ask(
                "troupe.workers.data.tokenizer_probe:decode", {"model": self._model, "ids": wanted}, _TIMEOUT_S
            )[0]
        except (ProbeFailed, IndexError, OSError) as error:
            self.problem = getattr(error, "raised", "") or str(error)
            self._ask_at = time.monotonic() + self._retry_s
            return
        self.problem = ""
        self._known |= dict(zip(wanted, texts, strict=True))

    def __getitem__(self, token: int) -> str:
        """The text of a token; its id in angle brackets if it is not known."""
        return self._known.get(token, f"<{token}>")

    def __bool__(self) -> bool:
        """Whether there are texts to show."""
        return not self.problem

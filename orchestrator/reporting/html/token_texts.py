"""Texts of tokens by id, asked of the run's tokenizer once for each id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.spec.probe import ProbeFailed, ask

_TIMEOUT_S = 60.0


class TokenTexts:
    """The vocabulary of a run, as far as its samples use it."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        """`model` is the section of the spec."""
        self._model = dict(model)
        self._known: dict[int, str] = {}
        self.problem = "" if model else "the run has no spec.yaml with a model"
        """Why there are no texts; empty: there are."""

    def learn(self, ids: Iterable[int]) -> None:
        """Asks for the texts of those ids that are not known yet; sets `problem` where that fails."""
        wanted = sorted(set(ids) - self._known.keys())
        if not wanted or self.problem:
            return
        try:
            texts = ask("workers.data.token_texts:decode", {"model": self._model, "ids": wanted}, _TIMEOUT_S)[0]
        except (ProbeFailed, IndexError, OSError) as error:
            self.problem = getattr(error, "raised", "") or str(error)
            return
        self._known |= dict(zip(wanted, texts, strict=True))

    def __getitem__(self, token: int) -> str:
        """The text of a token; its id in angle brackets where it is not known."""
        return self._known.get(token, f"<{token}>")

    def __bool__(self) -> bool:
        """Whether there are texts to show."""
        return not self.problem

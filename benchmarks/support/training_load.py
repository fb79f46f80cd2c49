"""A trainer that runs in the background, as during training that overlaps generation.

This module does not import torch at the top: engine processes import it, and must set their threads before torch.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

from benchmarks.support.harness import Turn
from benchmarks.support.processes import RemoteObject
from troupe.workers.contract.config import PolicyConfig

Ids = TypeVar("Ids")

ROWS = 16
PROMPT_TOKENS = RESPONSE_TOKENS = 16
"""Rows are short, so that several of them are trained per turn: trained tokens are counted by whole rows."""
ANSWER_TIMEOUT_S = 300.0


class TrainingLoad:
    """Runs the bare loop's updates on a fixed batch, back to back, on a separate thread."""

    def __init__(self, config: PolicyConfig) -> None:
        import torch

        from benchmarks.support.bare_loop import BareTrainer, SampledSequence

        self._trainer = BareTrainer(config)
        generator = torch.Generator().manual_seed(config.seed)
        vocabulary: int = self._trainer.model.config.get_text_config().vocab_size

        def ids(count: int) -> list[int]:
            return torch.randint(vocabulary, (count,), generator=generator).tolist()

        logprobs = [-float(torch.tensor(vocabulary).log())] * RESPONSE_TOKENS
        self._batch = [SampledSequence(ids(PROMPT_TOKENS), ids(RESPONSE_TOKENS), logprobs) for _ in range(ROWS)]
        self._advantages = torch.tensor([1.0, -1.0]).repeat(ROWS // 2)
        self._tokens = 0
        self._failure = ""
        threading.Thread(target=self._train, name="training-load", daemon=True).start()

    def trained(self) -> int:
        """Response tokens trained so far. Raises RuntimeError where the training thread failed."""
        if self._failure:
            raise RuntimeError(f"the training load failed: {self._failure}")
        return self._tokens

    def _train(self) -> None:
        """Train on the fixed batch until the process ends or an update fails; waits for nothing."""
        try:
            while True:
                for number in range(ROWS):  # row by row, because an update takes longer than a turn
                    row = slice(number, number + 1)
                    train = self._trainer.update if number == ROWS - 1 else self._trainer.add_gradients
                    train(self._batch[row], self._advantages[row])
                    self._tokens += RESPONSE_TOKENS
        except Exception as error:
            self._failure = repr(error)


class BackgroundLoad:
    """Measures what a training load trains during a turn; without a load it measures nothing."""

    def __init__(self, load: RemoteObject | None) -> None:
        self._load = load

    @property
    def pids(self) -> list[int]:
        """Process ids of the load."""
        return [] if self._load is None else [self._load.pid]

    def trained(self) -> int:
        """Response tokens trained so far. The first call starts the training."""
        return 0 if self._load is None else self._load.call("trained", timeout_s=ANSWER_TIMEOUT_S)

    async def during(self, turn: Awaitable[tuple[Turn, Ids]]) -> tuple[Turn, Ids]:
        """Await the turn and add the load's tokens per second, because a contender may be fast at its expense.

        The other contenders must be suspended already: tokens trained while they are being suspended do not count.
        """
        if self._load is None:
            return await turn
        before = self.trained()
        figures, ids = await turn
        trained = self.trained() - before
        return replace(figures, figures={"trained beside it, tokens/s": trained / figures.wall_s}), ids

    def close(self) -> None:
        """End the load."""
        if self._load is not None:
            self._load.close()

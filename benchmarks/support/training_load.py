"""A trainer that never stops: what generation runs beside while a policy is trained.

Engines set their threads before torch is imported, and their processes import this module.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

from benchmarks.harness import Turn
from benchmarks.processes import Child
from workers.config import PolicyConfig

Ids = TypeVar("Ids")

ROWS = 16
PROMPT_TOKENS = RESPONSE_TOKENS = 16
"""Rows are small: a turn sees several of them, and what it trains is counted in rows."""
ANSWER_TIMEOUT_S = 300.0


class TrainingLoad:
    """The bare loop's updates on a batch that stays the same, one after the other, on a thread of their own."""

    def __init__(self, config: PolicyConfig) -> None:
        import torch

        from benchmarks.bare_loop import BareTrainer, Sampled

        self._trainer = BareTrainer(config)
        generator = torch.Generator().manual_seed(config.seed)
        vocabulary: int = self._trainer.model.config.get_text_config().vocab_size

        def ids(count: int) -> list[int]:
            return torch.randint(vocabulary, (count,), generator=generator).tolist()

        logprobs = [-float(torch.tensor(vocabulary).log())] * RESPONSE_TOKENS
        self._batch = [Sampled(ids(PROMPT_TOKENS), ids(RESPONSE_TOKENS), logprobs) for _ in range(ROWS)]
        self._advantages = torch.tensor([1.0, -1.0]).repeat(ROWS // 2)
        self._tokens = 0
        self._failure = ""
        threading.Thread(target=self._train, name="training-load", daemon=True).start()

    def trained(self) -> int:
        """Response tokens trained so far. Raises RuntimeError where training came to an end."""
        if self._failure:
            raise RuntimeError(f"the training load has stopped: {self._failure}")
        return self._tokens

    def _train(self) -> None:
        try:
            while True:
                for number in range(ROWS):  # counted row by row: an update takes longer than a turn
                    row = slice(number, number + 1)
                    train = self._trainer.update if number == ROWS - 1 else self._trainer.add_gradients
                    train(self._batch[row], self._advantages[row])
                    self._tokens += RESPONSE_TOKENS
        except Exception as error:
            self._failure = repr(error)


class Beside:
    """What the load trains during a turn; nothing where there is none."""

    def __init__(self, load: Child | None) -> None:
        self._load = load

    @property
    def pids(self) -> list[int]:
        """The load's process."""
        return [] if self._load is None else [self._load.pid]

    def trained(self) -> int:
        """Response tokens so far. The first call starts the training."""
        return 0 if self._load is None else self._load.call("trained", timeout_s=ANSWER_TIMEOUT_S)

    async def during(self, turn: Awaitable[tuple[Turn, Ids]]) -> tuple[Turn, Ids]:
        """The turn with the load's tokens per second beside it: a contender may be fast at the trainer's expense.

        All other contenders stand still by then: what is trained while they are being stopped belongs to nobody.
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

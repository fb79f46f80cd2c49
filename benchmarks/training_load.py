"""A trainer that never stops: what generation runs beside while a policy is trained."""

from __future__ import annotations

import threading

import torch

from benchmarks.bare_loop import BareTrainer, Sampled
from workers.config import PolicyConfig

ROWS = 4
PROMPT_TOKENS = RESPONSE_TOKENS = 64
"""A batch is small, so that a turn sees many updates."""


class TrainingLoad:
    """The bare loop's updates on a batch that stays the same, one after the other, on a thread of their own."""

    def __init__(self, config: PolicyConfig) -> None:
        self._trainer = BareTrainer(config)
        generator = torch.Generator().manual_seed(config.seed)
        vocabulary = int(self._trainer.model.get_input_embeddings().weight.shape[0])

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
                self._trainer.update(self._batch, self._advantages)
                self._tokens += ROWS * RESPONSE_TOKENS
        except Exception as error:
            self._failure = repr(error)

"""The schedule of the learning rate."""

from __future__ import annotations

import pytest

from troupe.workers.contract.config import TrainerConfig
from troupe.workers.training.optimizer import learning_rate


def test_learning_rate_schedules() -> None:
    config = TrainerConfig(learning_rate=1.0, schedule="linear", warmup_updates=2, min_lr_ratio=0.2)
    rates = [learning_rate(config, update, 7) for update in range(9)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, update, 7) for update in (2, 4, 6)] == pytest.approx([1.0, 0.6, 0.2])
    constant = config.model_copy(update={"schedule": "constant"})
    assert [learning_rate(constant, update, 7) for update in (0, 1, 5, 99)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert learning_rate(config.model_copy(update={"warmup_updates": 0}), 0, 1) == 1.0

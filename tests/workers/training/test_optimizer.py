"""The schedule of the learning rate, and what decays."""

from __future__ import annotations

import pytest
from torch import nn

from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.training.optimizer import adamw, learning_rate


def test_learning_rate_schedules() -> None:
    config = TrainerConfig(learning_rate=1.0, schedule="linear", warmup_updates=2, min_lr_ratio=0.2)
    rates = [learning_rate(config, update, 7) for update in range(9)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, update, 7) for update in (2, 4, 6)] == pytest.approx([1.0, 0.6, 0.2])
    constant = config.model_copy(update={"schedule": "constant"})
    assert [learning_rate(constant, update, 7) for update in (0, 1, 5, 99)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert learning_rate(config.model_copy(update={"warmup_updates": 0}), 0, 1) == 1.0


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    module[0].weight.requires_grad_(False)
    groups = adamw(module, TrainerConfig(weight_decay=0.1)).param_groups
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert [decay.get(parameter) for parameter in module.parameters()] == [None, 0.0, 0.0, 0.1, 0.0]

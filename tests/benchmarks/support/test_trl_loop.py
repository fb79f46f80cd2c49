"""Checks of TRL's steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.bare_loop import BareStep
from benchmarks.support.harness import NotCorrect
from benchmarks.support.trl_loop import check_steps, micro_batch_rows
from benchmarks.support.workload import Settings


def test_micro_batches_are_even_and_within_the_budget() -> None:
    assert micro_batch_rows(64, 160, 4096) == 16
    assert micro_batch_rows(64, 64, 4096) == 64
    assert micro_batch_rows(6, 100, 50) == 1


def trl_step(lengths: tuple[int, ...] = (3, 3, 3, 3), norm: float = 0.5, silent: float = 0.0) -> BareStep:
    ids = [[7] * length for length in lengths]
    return BareStep(1.0, {}, sum(lengths), {"grad_norm": norm, "reward": 0.1, "groups without signal": silent}, ids)


def test_trl_steps_must_have_the_same_amount_and_learn() -> None:
    four_of_three = Settings(Path("model"), "float32", "fixed", 2, 2, 3, 64, 1, 1, 17)
    assert check_steps([trl_step(), trl_step()], four_of_three).startswith("4 responses of 3 tokens in all 2 steps")
    for wrong in (trl_step((3, 3, 3)), trl_step((3, 3, 3, 2)), trl_step(norm=0.0), trl_step(norm=float("nan"))):
        with pytest.raises(NotCorrect, match="TRL, step 2"):
            check_steps([trl_step(), wrong], four_of_three)
    with pytest.raises(NotCorrect, match="TRL, step 2"):
        check_steps([trl_step(), trl_step(norm=0.0, silent=0.5)], four_of_three)
    told = check_steps([trl_step(), trl_step(norm=0.0, silent=1.0)], four_of_three)
    assert told.endswith("gradients are zero in 1, which had no signal")

"""Levels of a generated task, tried on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.workers.rewards import trials


def test_harder_levels_are_tried_only_while_nearly_all_samples_are_right(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model solves nothing; where every sample counts as right, all levels are tried."""
    levels = [{"max_digits": digits, "min_digits": 1} for digits in (1, 2, 3)]
    request = {"model": str(tiny_model), "task": "chain_sum", "levels": levels, "prompts": 2, "samples": 3}
    request |= {"max_tokens": 4, "enough": 1}
    assert list(trials.sample_levels(request)) == [[0, 0]]
    monkeypatch.setattr(trials, "_is_right", lambda *_: True)
    assert list(trials.sample_levels(request)) == [[3, 3]] * 3

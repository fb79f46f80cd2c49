"""The table of reward curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import reward_curves


def test_reward_curves_share_one_table(tmp_path: Path) -> None:
    for name, lines in {
        "one": [{"step": 0, "eval/reward": 0.1}, {"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": None}],
        "two": [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = {name: reward_curves.curve(tmp_path / name, "reward/mean") for name in ("one", "two")}
    assert reward_curves.table(curves).splitlines() == [
        "| step | one | two |",
        "| ---: | ---: | ---: |",
        "| 1 | 0.250 | 0.500 |",
        "| 2 |  | 0.750 |",
    ]
    with pytest.raises(ValueError, match="no finished step has eval/loss"):
        reward_curves.curve(tmp_path / "one", "eval/loss")

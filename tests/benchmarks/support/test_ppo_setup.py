"""The critical path of a PPO step."""

from __future__ import annotations

from benchmarks.support.ppo_setup import critical_path


def test_critical_path_takes_the_longest_of_what_can_run_side_by_side() -> None:
    stages = {"generate": 4.0, "prepare": 0.5, "sync": 0.25}
    scoring = {"reward": 0.1, "reference": 1.0, "critic": 2.0, "old log-probs": 1.5}
    updates = {"policy update": 3.0, "critic update": 5.0}
    assert critical_path(stages | scoring | updates) == 4.75 + 2.0 + 5.0

"""Steps to the target, and resumed reports, of time_to_reward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import time_to_reward
from benchmarks.support.grpo_setup import ContenderSteps
from benchmarks.support.harness import NotCorrect, Turn
from benchmarks.support.workload import Settings
from benchmarks.time_to_reward import missed_target, steps_to, to_target


def training(rewards: list[float]) -> ContenderSteps:
    turns = [Turn(2.0, 10, 3.0, 0.5) for _ in rewards]
    return ContenderSteps({"bare loop": turns}, {"bare loop": rewards}, {})


def test_steps_are_counted_until_the_mean_of_the_last_ones_is_the_target() -> None:
    rewards = [0.1, 0.5, 0.1, 0.3, 0.4, 0.4]
    assert steps_to(rewards, 0.35, 2) == 5
    assert steps_to(rewards, 0.5, 1) == 2
    assert steps_to(rewards, 0.5, 2) is None


def test_time_to_a_reward_is_that_of_the_steps_it_took() -> None:
    turn = to_target("bare loop", training([0.1, 0.5, 0.1, 0.3, 0.4, 0.4]), 0.35, 2)
    assert (turn.wall_s, turn.cpu_s, turn.figures["steps"]) == (10.0, 15.0, 5.0)


def test_a_baseline_that_misses_the_target_counts_with_all_its_steps() -> None:
    steps = training([0.1, 0.3, 0.2])
    assert to_target("bare loop", steps, 0.35, 2).wall_s == 6.0
    assert missed_target(steps, 0.35, 2) == {"bare loop": "target missed: 0.2500 at best; all 3 steps count"}
    assert missed_target(steps, 0.25, 2) == {}


def test_the_product_must_reach_the_target() -> None:
    steps = training([0.1, 0.3])
    own = ContenderSteps({"troupe": steps.taken["bare loop"]}, {"troupe": steps.rewards["bare loop"]}, {})
    with pytest.raises(NotCorrect, match=r"reached a reward of 0\.2000 in 2 steps, less than the target"):
        to_target("troupe", own, 0.35, 2)


def test_every_seed_is_a_turn_with_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def train(settings: Settings, *_: object) -> ContenderSteps:
        trained.append(settings.seed)
        return replace(training([0.5, 0.9]), checks={"samples": f"those of {settings.seed}"})

    monkeypatch.setattr(time_to_reward, "take_steps", train)
    report = time_to_reward.measure(time_to_reward.parse(["--seeds", "1", "2", "3"]))
    assert trained == [1, 2, 3] and len(report.taken["bare loop"]) == 3
    assert report.checks == {f"seed {seed}, samples": f"those of {seed}" for seed in trained}

"""Summary of a run: trend, time left, bound."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from troupe.orchestrator.telemetry.run_summary import RunSummary, duration, trend


def summary_of(*steps: Mapping[str, object], total: int = 100) -> RunSummary:
    found = RunSummary(total)
    for number, metrics in enumerate(steps, 1):
        found.add(number, metrics)
    return found


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (61, "1 min"),
        (3599, "1 h"),
        (4800, "1 h 20 min"),
        (180_000, "2 d 2 h"),
        (172_800, "2 d"),
    ],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_noise_is_no_trend_and_a_trend_in_noise_is_one() -> None:
    false, found = 0, 0
    for seed in range(200):
        noise = random.Random(seed)
        flat = [noise.gauss(0.0, 1.0) for _ in range(30)]
        false += trend(flat)[2] != 0
        found += trend([value + step / 10 for step, value in enumerate(flat)])[2] == 1
    assert false < 20 and found > 195


def test_a_loss_that_falls_learns_and_a_reward_that_falls_does_not() -> None:
    assert summary_of(*({"policy/nll": 3.0 - n / 10} for n in range(12))).learns() == "loss 2.85 to 2.05: falls"
    falling = summary_of(*({"reward/mean": 1.0 - n / 20} for n in range(12)))
    assert falling.learns() == "reward 0.925 to 0.525: falls, and should rise"
    assert summary_of({"reward/mean": 0.5}, {"reward/mean": 0.5}).learns() == "reward 0.5 to 0.5: no clear change yet"
    assert summary_of({"reward/mean": float("nan")}, {}).learns() == ""


def test_the_time_left_follows_the_median_of_recent_steps() -> None:
    slow_start = [{"seconds/step": 500.0}, *({"seconds/step": 10.0} for _ in range(9))]
    assert summary_of(*slow_start).left() == "15 min left"
    assert summary_of({}).left() == "" and summary_of({"seconds/step": 5.0}, total=1).left() == ""


def test_the_bound_is_what_most_of_a_step_goes_to() -> None:
    step: dict[str, object] = {
        "seconds/step": 10.0,
        "seconds/generate": 2.0,
        "seconds/prepare": 1.0,
        "seconds/update": 6.0,
    }
    assert summary_of(step).bound() == "20% waiting for samples, 70% training"
    assert summary_of(step).bottleneck() == "trainer"
    waits = step | {"seconds/generate": 7.0, "seconds/update": 1.0}
    assert summary_of(waits | {"seconds/reward": 9.0, "workers/reward": 2.0}).bottleneck() == "engines"
    assert summary_of(waits | {"seconds/reward": 9.0, "workers/reward": 1.0}).bottleneck() == "reward workers"
    assert summary_of(waits | {"episodes/turns": 3.0}).bottleneck() == "engines and environment"
    offline = summary_of({"seconds/step": 10.0, "seconds/update": 9.0})
    assert (offline.bound(), offline.bottleneck()) == ("90% training", "")
    assert summary_of({}).bound() == ""


def test_overlapping_steps_say_who_was_idle_and_how_old_samples_were() -> None:
    steps = [{"staleness/mean": older, "utilisation/rollout": busy} for older, busy in ((0.0, 0.9), (1.0, 0.8))]
    assert summary_of(*steps).balance() == "engines idle 15%, samples 0.5 versions old"
    assert summary_of(steps[0]).balance() == summary_of({"staleness/mean": 1.0}).balance() == ""

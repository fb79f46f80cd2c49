"""What held for a few steps and is over: a note that quotes the values of these steps. And rules that fail."""

from __future__ import annotations

from typing import Any

import pytest

from troupe.orchestrator.insight.verdicts.apply import apply_rules
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.verdict import Level, Verdict

STEPS = 59

CASES = [
    ("entropy-collapse", {"policy/entropy": (1.0, 0.02)}, "from 1 to 0.02 nats"),
    ("no-signal", {"groups/mixed": (0.8, 0.0), "reward/std": (0.3, 0.2)}, "100% of the groups are equal"),
    ("no-signal", {"reward/std": (0.3, 0.0), "reward/mean": (0.5, 1.0)}, "the same reward, 1"),
    ("kl-explosion", {"kl_ref": (0.1, 2.0)}, "2 nats per token"),
    ("steps-too-large", {"policy/kl_old": (0.01, 0.9)}, "0.9 nats per token at most"),
    ("clip-fraction", {"policy/clip_fraction": (0.05, 0.6)}, "60% of the tokens"),
    ("sampler-gap", {"policy/rollout_logprob_gap": (0.001, 0.4)}, "0.4 nats"),
    ("length-collapse", {"response_tokens/mean": (100.0, 5.0)}, "from 100 to 5.0 tokens"),
    ("truncation", {"truncated": (0.1, 0.9)}, "90% of the responses"),
    ("failing-rewards", {"failed_samples": (0.0, 16.0)}, "50% of a step's"),
    ("starved-trainer", {"utilisation/generate": (0.1, 0.7)}, "70% of a step"),
    ("starved-engines", {"utilisation/generate": (0.1, 0.01)}, "1.0% of a step"),
]
SPEC = {"schedule": {"prompts_per_step": 4}, "algorithm": {"group_size": 8}, "sampling": {"max_tokens": 64}}
ASYNCHRONOUS = SPEC | {"schedule": {"prompts_per_step": 4, "max_staleness": 1}}


def found(name: str, metrics: dict[str, tuple[float, float]], first: int) -> Verdict:
    """The verdict on a run whose metrics have their second value at three steps, and their first one elsewhere."""
    bad = range(first, first + 3)
    lines: list[dict[str, Any]] = [
        {"step": step, **{metric: values[step in bad] for metric, values in metrics.items()}}
        for step in range(1, STEPS + 1)
    ]
    spec = ASYNCHRONOUS if name.startswith("starved") else SPEC
    (verdict,) = [one for one in apply_rules(History.of(lines, spec)) if one.name == name]
    return verdict


@pytest.mark.parametrize(("name", "metrics", "quoted"), CASES)
def test_what_is_over_is_a_note_with_the_values_that_were_seen(
    name: str, metrics: dict[str, tuple[float, float]], quoted: str
) -> None:
    verdict = found(name, metrics, 20)
    assert verdict.level is Level.NOTE
    assert (verdict.since, verdict.until) == (20, 22)
    assert quoted in verdict.summary


@pytest.mark.parametrize(("name", "metrics", "quoted"), CASES)
def test_what_goes_on_is_an_alarm(name: str, metrics: dict[str, tuple[float, float]], quoted: str) -> None:
    verdict = found(name, metrics, STEPS - 2)
    assert verdict.is_alarm
    assert (verdict.since, verdict.until) == (STEPS - 2, None)
    assert quoted in verdict.summary


def test_a_jump_of_the_gap_that_is_over_is_a_note() -> None:
    verdict = found("sampler-gap", {"policy/rollout_logprob_gap": (0.001, 0.05)}, 20)
    assert (verdict.level, verdict.since, verdict.until) == (Level.NOTE, 20, 22)
    assert found("sampler-gap", {"policy/rollout_logprob_gap": (0.001, 0.05)}, STEPS - 2).level is Level.PROBLEM


def test_signs_of_hacking_count_while_they_last() -> None:
    def names(repeats: range) -> set[str]:
        lines = [
            {"step": step, "reward/mean": 0.01 * step, "repetition": 0.7 if step in repeats else 0.1}
            for step in range(1, STEPS + 1)
        ]
        return {verdict.name for verdict in apply_rules(History.of(lines))}

    assert "reward-hacking" not in names(range(20, 23))
    assert "reward-hacking" in names(range(50, STEPS + 1))


def test_steps_without_a_gradient_make_no_spikes_of_the_others() -> None:
    norms = [1.0 if step % 3 == 0 else 0.0 for step in range(1, 40)]

    def spikes(values: list[float]) -> list[str]:
        lines = [{"step": step, "policy/grad_norm": value} for step, value in enumerate(values, 1)]
        return [verdict.summary for verdict in apply_rules(History.of(lines)) if verdict.name == "gradient-spikes"]

    assert spikes(norms) == []
    (summary,) = spikes([*norms, 50.0])
    assert "1 of 40 steps" in summary and "(50 against 1)" in summary


def test_a_run_that_records_no_reward_workers_is_judged() -> None:
    seconds = {"seconds/generate": 2.0, "seconds/reward": 4.0, "seconds/step": 3.0}
    lines = [{"step": step, "workers/reward": 0, **seconds} for step in range(1, 9)]
    assert "slow-rewards" in {verdict.name for verdict in apply_rules(History.of(lines))}


def test_a_rule_that_fails_is_logged_and_the_others_speak(caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"step": step, "utilisation/generate": 0.9, "kl_ref": 2.0} for step in range(1, 9)]
    verdicts = apply_rules(History.of(lines, {"schedule": {"max_staleness": "one"}}))
    assert [verdict.name for verdict in verdicts] == ["kl-explosion"]
    assert "starved_trainer" in caplog.text

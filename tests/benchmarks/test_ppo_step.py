"""Spec, checks and phases of ppo_step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ppo_step import check, four_models
from benchmarks.support.harness import NotCorrect
from benchmarks.support.workload import grpo_spec, phases_of
from tests.benchmarks.settings import SETTINGS


def test_ppo_has_four_models_in_workers_of_their_own() -> None:
    plan = four_models(grpo_spec(SETTINGS, Path("m"), 3, 8))
    assert plan.algorithm.name == "ppo" and plan.group_size == 2
    assert plan.roles.critic is not None and plan.roles.reference is not None
    assert plan.roles.reference.colocate_with is None
    assert plan.roles.critic.micro_batch_tokens == plan.roles.policy.micro_batch_tokens


def ppo_lines(**wrong: float) -> list[dict[str, float]]:
    right = {"ledger/dropped": 0.0, "response_tokens/mean": 3.0, "policy/rollout_logprob_gap": 0.01}
    lines = [{"step": float(step), "ledger/trained": 4.0 * (step - 1)} | right for step in (1, 2, 3)]
    lines[1] |= wrong
    return lines


def test_ppo_check_passes_equal_work() -> None:
    assert check(SETTINGS, ppo_lines(), [0.02])["sampler to trainer"].startswith("0.0200 nats")


@pytest.mark.parametrize(
    ("wrong", "gap", "message"),
    [
        ({"ledger/trained": 3.0}, 0.01, "3 samples trained"),
        ({"ledger/dropped": 1.0}, 0.01, "ledger"),
        ({"response_tokens/mean": 2.5}, 0.01, "2.5 tokens"),
        ({"policy/rollout_logprob_gap": 0.2}, 0.01, "0.2000 nats"),
        ({}, 0.3, "0.3000 nats"),
    ],
)
def test_ppo_check_refuses_other_work(wrong: dict[str, float], gap: float, message: str) -> None:
    with pytest.raises(NotCorrect, match=message):
        check(SETTINGS, ppo_lines(**wrong), [gap])


def test_ppo_phases_add_up_to_the_step() -> None:
    line = {f"seconds/{name}": 2.0 for name in ("generate", "prepare", "update", "sync")}
    assert phases_of(line, 9.0)["other"] == 1.0


def test_ppo_leaves_the_rest_of_the_work_as_it_was() -> None:
    plan = grpo_spec(replace(SETTINGS, samples=4), Path("m"), 3, 8)
    assert four_models(plan).sampling == plan.sampling and four_models(plan).data == plan.data

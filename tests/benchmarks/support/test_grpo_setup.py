"""Checks of the contenders of a GRPO step, and the prompts that they train on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support import grpo_setup
from benchmarks.support.bare_loop import BareStep
from benchmarks.support.harness import (
    NotCorrect,
)
from benchmarks.support.workload import PHASES, Group, grpo_spec, phases_of
from tests.benchmarks.settings import SETTINGS
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import load_pools


def steps(length: int = 3, gap: float = 0.01, norm: float = 1.0):
    """One step's worth of what `grpo_setup.check` reads."""
    work = [[Group("a", 0, (1,), 2, 1), Group("b", 1, (1,), 2, 2)]]
    ids = [7] * length
    metrics = [{"policy/rollout_logprob_gap": 0.01, "policy/grad_norm": 1.0}]
    sampled = [{(uid, index): [7] * 3 for uid in "ab" for index in range(2)}]
    bare = [BareStep(1.0, {}, 4 * length, {"rollout_logprob_gap": gap, "grad_norm": norm}, [ids] * 4)]
    return work, metrics, sampled, bare


def test_step_check_passes_equal_work() -> None:
    checks = grpo_setup.check(SETTINGS, *steps())
    assert checks["first step"].startswith("4 of 4 responses equal")


def test_step_check_passes_steps_without_an_advantage() -> None:
    work, metrics, sampled, bare = steps()
    nothing = {"policy/empty_updates": 1.0}
    assert "troupe 0.0100" in grpo_setup.check(SETTINGS, work, [*metrics, nothing], sampled, bare)["sampler to trainer"]
    with pytest.raises(KeyError):
        grpo_setup.check(SETTINGS, work, [*metrics, {}], sampled, bare)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"length": 2}, "expected 4 of 3"), ({"gap": 0.5}, "nats per token, more than"), ({"norm": 2.0}, "norms of")],
)
def test_step_check_refuses_other_work(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(NotCorrect, match=message):
        grpo_setup.check(SETTINGS, *steps(**wrong))  # pyright: ignore[reportArgumentType]


def test_step_check_refuses_another_loss_of_the_same_samples() -> None:
    with pytest.raises(NotCorrect, match=r"norms of 1\.0000 and 1\.1270 although 4 of 4 samples"):
        grpo_setup.check(SETTINGS, *steps(norm=1.127))
    work, metrics, sampled, bare = steps(norm=1.127)
    sampled[0]["a", 0] = [8] * 3
    assert grpo_setup.check(SETTINGS, work, metrics, sampled, bare)["first step"].startswith("3 of 4 responses equal")


def test_step_check_refuses_other_prompts() -> None:
    work, metrics, sampled, bare = steps()
    del sampled[0]["a", 1]
    with pytest.raises(NotCorrect, match="same prompts"):
        grpo_setup.check(SETTINGS, work, metrics, sampled, bare)


def test_steps_draw_the_products_prompts(tiny_model: Path) -> None:
    plan = grpo_spec(replace(SETTINGS, model=tiny_model), tiny_model, turns=2, prompts=4)
    pool, _ = load_pools(plan.data)
    assert isinstance(pool, Pool)
    work = grpo_setup.groups_by_step(SETTINGS, plan, pool, tiny_model)
    assert [len(groups) for groups in work] == [2, 2]
    assert sorted(one.row for groups in work for one in groups) == [0, 1, 2, 3]
    assert len({one.uid for groups in work for one in groups}) == 4


def test_phases_add_up_to_the_step() -> None:
    metrics = {f"seconds/{name}": 2.0 for name in PHASES}
    assert phases_of(metrics, 10.0) | {"other": 2.0} == phases_of(metrics, 10.0)


class Contender:
    """Counts how often something waits for its answer."""

    waits = 0

    def receive(self, timeout_s: float) -> None:
        """Answers once; later nothing comes."""
        self.waits += 1
        if self.waits > 1:
            raise TimeoutError(timeout_s)


def test_contenders_are_waited_for_once_although_the_start_is_reported_again() -> None:
    others = {"bare loop": Contender(), "TRL": Contender()}
    console = grpo_setup.AlternatingConsole(others, [], lambda _: False)  # pyright: ignore[reportArgumentType]
    console.phase("start workers", 2, 3, "policy-0")
    assert [one.waits for one in others.values()] == [0, 0]
    for _ in range(2):
        console.phase("start workers", 3, 3)
    assert [one.waits for one in others.values()] == [1, 1]

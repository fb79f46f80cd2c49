"""Runs with a curriculum against fakes: draws follow from finished steps, and a resumed run draws the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes import FakeTable, FaultyReward
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.spec.sections import CurriculumConfig
from troupe.workers.contract.messages import RewardSummary

STEPS = 8
EASY, HARD = frozenset(range(4)), frozenset(range(4, 8))
"""Rows of the pool of 12 whose samples are all solved, or all not; every second one of the others is."""


class ByRow(FaultyReward):
    """Rewards follow from the row alone."""

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        uid = rollouts.uids[0]
        row = int(uid.partition("-r")[2])
        values = tuple(float(row in EASY or (row not in HARD and i % 2)) for i in range(rollouts.samples))
        statuses = ("ok",) * rollouts.samples
        return RewardSummary(uid, rollouts.attempt, statuses, values, {}), FakeTable("rewards", (uid,))


def run_of(out: Path, *, replaceable: int = 0, staleness: int = 0, resume: bool = False) -> RolloutRun:
    schedule = {"steps": STEPS, "max_staleness": staleness}
    checkpoint, algorithm = {"every_steps": 1}, {"dynamic_sampling": replaceable}
    run = RolloutRun(out, resume=resume, schedule=schedule, checkpoint=checkpoint, algorithm=algorithm)
    run.reward = ByRow()
    run.curriculum = CurriculumConfig(decay=1.0)
    return run


def rows(run: RolloutRun) -> list[list[int]]:
    """Rows of the prompts of every batch, one per group."""
    return [[int(uid.partition("-r")[2]) for uid, sample in keep if sample == 0] for keep in run.policies[0].prepared]


def lines(run: RolloutRun) -> list[dict[str, float]]:
    """The metrics of every step that follow from what was drawn."""
    names = ("step", "reward/mean", "ledger/trained", "ledger/dropped")
    return [{k: v for k, v in line.items() if k in names or k.startswith("curriculum/")} for line in run.lines()]


def test_prompts_that_are_always_or_never_solved_are_drawn_less_often(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.change(schedule={"steps": 60}, checkpoint={"every_steps": 0})
    run.run()
    counts = Counter(row for batch in rows(run) for row in batch)
    often = [counts[row] for row in range(8, 12)]
    seldom = [counts[row] for row in range(8)]
    assert max(often) - min(often) <= 1  # once in every pass
    # p of a prompt solved n times of n approaches 1: 4 p (1 - p) falls to the floor of 0.1.
    assert max(seldom) < 0.5 * min(often)
    last = run.lines()[-1]
    assert last["curriculum/seen"] == 12 and last["curriculum/set_aside"] == 8
    assert last["curriculum/skipped"] > 0


@pytest.mark.parametrize("replaceable", [0, 8])
def test_a_resumed_run_draws_what_the_uninterrupted_run_drew(tmp_path: Path, replaceable: int) -> None:
    """Also with groups that dynamic sampling replaced, whose results are part of the checkpoint."""
    whole = run_of(tmp_path / "whole", replaceable=replaceable)
    whole.run()
    first = run_of(tmp_path / "parts", replaceable=replaceable)
    first.run_until(3)
    second = run_of(tmp_path / "parts", replaceable=replaceable, resume=True)
    second.run()
    resumed_at = STEPS - len(rows(second))
    assert resumed_at >= 3
    assert rows(first)[:resumed_at] + rows(second) == rows(whole)
    assert lines(second) == lines(whole)


def test_results_of_replaced_groups_count(tmp_path: Path) -> None:
    """Without them the curriculum would never see the prompts that dynamic sampling replaces."""
    run = run_of(tmp_path, replaceable=8)
    run.run()
    assert {row for batch in rows(run) for row in batch} == set(range(8, 12))
    assert run.lines()[-1]["curriculum/seen"] == 12
    assert run.lines()[-1]["curriculum/set_aside"] == 8
    assert run.lines()[-1]["ledger/dropped"] > 0


def test_groups_drawn_ahead_are_recorded_and_sampled_again_after_a_resume(tmp_path: Path) -> None:
    """With generation ahead of training, a resumed run trains the prompts that were in flight at the checkpoint."""
    first = run_of(tmp_path, staleness=2)
    first.run_until(3)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    state = json.loads((newest / "state.json").read_text())
    in_flight = {uid for uid, *_ in state["ledger"]["open"]}
    assert len(in_flight) >= 5
    second = run_of(tmp_path, staleness=2, resume=True)
    outcome = second.run()
    trained = [uid for keep in second.policies[0].prepared for uid, sample in keep if sample == 0]
    assert in_flight <= set(trained)
    assert len(trained) == len(set(trained)) == 5 * (STEPS - state["step"])
    assert outcome.ledger["dispatched"] == outcome.ledger["trained"] == 20 * STEPS

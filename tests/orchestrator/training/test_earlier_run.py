"""A spec and the state of a checkpoint of an earlier version (`earlier_run/`) are read by this version.

That version had packages `orchestrator` and `workers` instead of `troupe`. Its classes wrote the two files: two
steps of PPO on 32 prompts, 16 a step, then two groups in flight, one of them at its second attempt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from troupe.orchestrator.data.mixture import prompt_order
from troupe.orchestrator.data.prompts import PromptPick, load_train_pool
from troupe.orchestrator.data.summary import RunData
from troupe.orchestrator.runs.resume import require_same_rows, resumption
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.checkpoint import Checkpoint, trainer_layouts
from troupe.orchestrator.training.ledger import Ledger, OpenGroup
from troupe.orchestrator.training.parts import states_of
from troupe.orchestrator.training.state import BestState, PenaltyState
from troupe.workers.contract.advantage_state import AdvantageState, Moments, PromptHistory

EARLIER = Path(__file__).parent / "earlier_run"


@pytest.fixture
def spec() -> RolloutSpec:
    return plan_runs(read_document(EARLIER / "spec.yaml"))[0].spec.rollouts


@pytest.fixture
def state() -> dict[str, Any]:
    return json.loads((EARLIER / "state.json").read_text())


def test_the_spec_is_valid_and_means_what_it_meant(spec: RolloutSpec) -> None:
    assert (spec.name, spec.algorithm.name, spec.group_size, spec.schedule.minibatches) == ("earlier-ppo", "ppo", 4, 2)
    assert spec.roles.critic is not None and spec.roles.critic.learning_rate == 0.01
    assert spec.roles.reward.functions[0].args == {"letters": "aeiou"}


def test_the_run_resumes_with_its_spec(spec: RolloutSpec, state: dict[str, Any], tmp_path: Path) -> None:
    found = Checkpoint(2, tmp_path, state)
    assert found.trainers() == trainer_layouts(spec)
    assert resumption(tmp_path, found, spec, EARLIER / "spec.yaml").lines() == [
        f"resuming after step 2 of 15 from {tmp_path}; the spec is unchanged"
    ]


def test_the_order_of_prompts_continues(spec: RolloutSpec, state: dict[str, Any], tmp_path: Path) -> None:
    pool = load_train_pool(spec.data, spec.failures.on_bad_row, plain=True)
    saved = state["source"]["prompts"]
    require_same_rows(Checkpoint(2, tmp_path, state), RunData(pool, {}, None).drawn)
    prompts = prompt_order(spec, pool)
    prompts.restore(saved)
    # As the earlier version drew them.
    drawn = [prompts.next() for _ in range(3)]
    assert [(pick.prompt_uid, pick.row) for pick in drawn] == [("e1-r14", 14), ("e1-r9", 9), ("e1-r26", 26)]
    assert isinstance(drawn[0], PromptPick)


def test_the_ledger_and_the_other_state_are_restored(state: dict[str, Any]) -> None:
    ledger = Ledger.restore(state["ledger"])
    ledger.check()
    counts = {"dispatched": 136, "trained": 127, "dropped": 1, "in_flight": 8, "retries": 1}
    assert {name: ledger.counts()[name] for name in counts} == counts
    assert ledger.drop_reasons() == {"reward_failed": 1}
    assert ledger.open_groups() == [OpenGroup("e1-r12", 12, 1), OpenGroup("e1-r7", 7, 0)]
    rewards = Moments().seen([0.25, 0.5, 0.125])
    history = {15: PromptHistory(visits=1, rewards=rewards)}
    advantages = AdvantageState.model_validate(state["source"]["advantages"])
    assert advantages == AdvantageState(rewards=rewards, returns=rewards, prompts=history)
    parts = states_of(state)
    assert PenaltyState.model_validate(parts["penalty"]) == PenaltyState()
    assert BestState.model_validate(parts["best"]) == BestState() and parts["evaluations"] == {"due": False}

"""Plans of replays, and what the command says of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from troupe.orchestrator.cli import app
from troupe.orchestrator.data.texts import TextPicks
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight import replay as replays
from troupe.orchestrator.insight.replay import (
    Each,
    Repeated,
    ReplayOutcome,
    plan_replay,
    software_changes,
    spec_of,
    start_problem,
)
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.micro_batches import minibatches, plan_texts
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.step_record import REPLAY, STEP, StepRecord, folder_of, packed_texts, read_step
from troupe.workers.contract.messages import KEPT_BATCH, TRAIN, KeptFile, TrainRow
from troupe.workers.data.kept_tables import write_tables

SPECS = ROOT / "deploy" / "specs"
Keep = Callable[..., None]


def kept_step(step: int, **changes: Any) -> StepRecord:
    """A step of a run on rollouts, whose weights are named after the number of steps."""
    kept = StepRecord(
        step=step,
        software=("torch 2.13.0", "processor X"),
        working_folder=str(ROOT),
        state=PenaltyState(),
        rows=(TrainRow(9, 4, True, 5, 0),),
        units=None,
        text_rows=(),
        text_tokens=(),
        files={KEPT_BATCH: KeptFile(0, "")},
        before={"policy": f"w{step - 1}"},
        after={"policy": f"w{step}"},
        updates=({"policy/loss": 0.5, "policy/kl": math.nan},),
    )
    return kept.model_copy(update=changes)


def table() -> pa.Table:
    """A TRAIN table without rows."""
    return TRAIN.empty_table()


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Keeps a step of the run in `tmp_path`, with its spec."""

    def keep(step: int, spec: RunSpec | None = None, **changes: Any) -> None:
        folder = folder_of(tmp_path / REPLAY, step)
        folder.mkdir(parents=True)
        files = write_tables(folder, {KEPT_BATCH: table()})
        (folder / STEP).write_text(kept_step(step, files=files, **changes).model_dump_json())
        (spec or load_rollout_spec(SPECS / "tiny-grpo.yaml")).write(folder / RESOLVED_SPEC)

    return keep


def save(run: Path, step: int) -> None:
    store = CheckpointStore(run / "checkpoints", keep=9)
    path = store.begin(step)
    store.commit(path, {})


def test_a_replay_starts_from_the_newest_checkpoint_before_the_step(tmp_path: Path, keep: Keep) -> None:
    for step in (1, 2, 3, 4, 5):
        keep(step)
    for step in (2, 4):
        save(tmp_path, step)
    plans = {step: plan_replay(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    steps = {step: [folder.kept.step for folder in plan.folders] for step, plan in plans.items()}
    assert steps == {1: [1], 2: [1, 2], 3: [3], 4: [3, 4], 5: [5]}
    assert plans[2].origin == "the initial model" and plans[5].origin == "the checkpoint of step 4"
    (tmp_path / "checkpoints" / "step-000004" / "state.json").write_text("{ }")  # damaged: the one before it is used
    assert [folder.kept.step for folder in plan_replay(tmp_path, 5).folders] == [3, 4, 5]


def test_a_missing_step_says_what_the_replay_needs(tmp_path: Path, keep: Keep) -> None:
    keep(3)
    words = r"it takes steps 1 to 3, from the initial model on: step 1 is not kept in .*; kept are 1 steps, 3 to 3"
    with pytest.raises(UsageError, match=words):
        plan_replay(tmp_path, 3)


def test_a_changed_table_is_refused_before_anything_starts(tmp_path: Path, keep: Keep) -> None:
    for step in (1, 2):
        keep(step)
    file = folder_of(tmp_path / REPLAY, 1) / KEPT_BATCH
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"step-000001/batch.arrow has changed: it has digest"):
        plan_replay(tmp_path, 2)


def test_paths_of_a_kept_spec_do_not_depend_on_the_current_folder(
    tmp_path: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(1)
    monkeypatch.chdir(tmp_path)
    assert plan_replay(tmp_path, 1).spec.model.path == str(ROOT / ".cache/models/tiny-llama")


def test_an_adapter_and_a_template_of_a_kept_spec_do_not_depend_on_it_either(
    tmp_path: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    (there / "own" / "adapter").mkdir(parents=True)
    (there / "own" / "chat.jinja").write_text("{{ messages }}")
    changes = ["roles.policy.lora={rank: 4}", "model.adapter=own/adapter", "model.chat_template=own/chat.jinja"]
    keep(1, load_rollout_spec(SPECS / "tiny-grpo.yaml", changes), working_folder=str(there))
    keep(2, load_rollout_spec(SPECS / "tiny-grpo.yaml", ["model.chat_template=none"]), working_folder=str(there))
    (there / "none").mkdir()
    monkeypatch.chdir(tmp_path)
    model = plan_replay(tmp_path, 1).spec.model
    assert (model.adapter, model.chat_template) == (str(there / "own/adapter"), str(there / "own/chat.jinja"))
    assert spec_of(read_step(tmp_path / REPLAY, 2)).model.chat_template == "none"


def test_steps_with_other_trainers_are_not_repeated_together(tmp_path: Path, keep: Keep) -> None:
    spec = load_rollout_spec(SPECS / "tiny-grpo.yaml")
    faster = load_rollout_spec(SPECS / "tiny-grpo.yaml", ["roles.policy.learning_rate=0.2"])
    keep(1, load_rollout_spec(SPECS / "tiny-grpo.yaml", ["roles.rollout.max_num_seqs=3", "schedule.steps=99"]))
    keep(2, spec)
    keep(3, faster)
    assert len(plan_replay(tmp_path, 2).folders) == 2
    words = r"the spec changed between step 1 and the last step \(.*roles.policy.learning_rate.*\), and there is no"
    with pytest.raises(UsageError, match=words):
        plan_replay(tmp_path, 3)
    save(tmp_path, 2)
    assert len(plan_replay(tmp_path, 3).folders) == 1


def test_a_longer_run_is_another_one_only_where_the_learning_rate_depends_on_it(tmp_path: Path, keep: Keep) -> None:
    for steps in (15, 30):
        decaying = ["roles.policy.schedule=cosine", f"schedule.steps={steps}"]
        keep(steps // 15, load_rollout_spec(SPECS / "tiny-grpo.yaml", decaying))
    with pytest.raises(UsageError, match=r"the spec changed between step 1 and the last step \(schedule.steps\)"):
        plan_replay(tmp_path, 2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tiny-grpo", "schedule.epochs=3"),
        ("tiny-grpo", "schedule.minibatches=2"),
        ("tiny-grpo", "algorithm.kl_states=8"),
        ("tiny-ppo", "algorithm.kl_stop=0.1"),
        ("tiny-ppo", "roles.critic.warmup_steps=2"),
    ],
)
def test_steps_with_other_updates_are_not_repeated_together(tmp_path: Path, keep: Keep, name: str, change: str) -> None:
    """The learning rate is constant, so that the workers' settings are the same."""
    limits = ["schedule.train_timeout_s=123", "failures.nonfinite_steps=9"]
    for step, overrides in enumerate(([], limits, [change]), start=1):
        keep(step, load_rollout_spec(SPECS / f"{name}.yaml", overrides))
    assert len(plan_replay(tmp_path, 2).folders) == 2
    field = change.partition("=")[0]
    words = rf"the spec changed between step 1 and the last step \({field}\), and there is no checkpoint"
    with pytest.raises(UsageError, match=words):
        plan_replay(tmp_path, 3)


def test_kept_texts_make_the_plans_of_the_run() -> None:
    """Plans sort equally long texts by row: the rows that are kept have the order of those of the whole table."""
    tokens = (5, 9, 9, 3, 9, 5, 8, 5, 9, 9)
    picks = TextPicks(None, tokens, (9, 2, 7, 0, 4, 2, 5))
    rows, kept_tokens, kept_picks = packed_texts(picks)
    assert [tokens[row] for row in rows] == list(kept_tokens)
    for pieces in minibatches(len(picks.rows), 2, (1, 2, 3)):
        whole = plan_texts(tokens, [picks.rows[piece] for piece in pieces], 2, 20)
        kept = plan_texts(kept_tokens, [kept_picks[piece] for piece in pieces], 2, 20)
        named = [[tuple(rows[row] for row in batch) for batch in plan.micro_batches] for plan in kept]
        assert named == [list(plan.micro_batches) for plan in whole]
        assert [plan.total_loss_tokens for plan in kept] == [plan.total_loss_tokens for plan in whole]
    assert packed_texts(None) == ([], (), ())


def repeated(**changes: Any) -> Repeated:
    updates = ({"policy/loss": 0.5, "policy/kl": math.nan},)
    step = Repeated(7, {"policy": "a"}, {"policy": "a"}, updates, updates, 0.1)
    return replace(step, **changes)


def test_metrics_that_differ_are_named_with_both_values() -> None:
    assert repeated().different_metrics() == []
    other = ({"policy/loss": 0.5, "policy/kl": 0.25}, {"policy/loss": 2.0})
    assert repeated(updates=other[:1]).different_metrics() == ["policy/kl is nan in the run, 0.25 here"]
    both = repeated(recorded_updates=({"policy/loss": 1.0}, {"policy/loss": 1.5}), updates=({"policy/loss": 1.0}, {}))
    assert both.different_metrics() == ["update 2 of 2: policy/loss is 1.5 in the run, nan here"]


def test_other_versions_and_other_first_weights_explain_a_difference() -> None:
    now = ("torch 2.14.0", "processor X")
    assert software_changes(("torch 2.13.0", "processor X"), now) == ["torch 2.13.0 in the run, torch 2.14.0 here"]
    assert start_problem({"policy": "a"}, {"policy": "a"}, "the initial model") == ""
    assert start_problem({}, {"policy": "a"}, "the initial model") == "", "not known"
    words = start_problem({"policy": "a", "critic": "b"}, {"policy": "c", "critic": "b"}, "the checkpoint of step 2")
    assert words.startswith("the policy of the checkpoint of step 2 differ")


@pytest.mark.parametrize("equal", [True, False])
def test_a_replay_is_printed_as_json(equal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def replay(run: Path, step: int, console: Console, each: Each, address: str | None) -> ReplayOutcome:
        steps = (repeated(step=3), repeated(step=step, found={"policy": "a" if equal else "b"}))
        for one in steps:
            each(one)
        return ReplayOutcome(steps, "", () if equal else ("torch 2.12 in the run, 2.13 here",))

    monkeypatch.setattr(replays, "replay", replay)
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "4", "--json"])
    assert result.exit_code == (0 if equal else 1)
    found = json.loads(result.stdout)
    assert found["equal"] is equal and [step["equal"] for step in found["steps"]] == [True, equal]
    assert found["steps"][1]["recorded"] == {"policy": "a"} and bool(found["software"]) is not equal

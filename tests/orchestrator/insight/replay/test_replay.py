"""Plans of replays, comparisons with another version of the code, and comparisons of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import ROOT
from troupe.orchestrator.data.texts import TextPicks
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.insight.replay.against import (
    StepThere,
    difference,
    own_root,
    replay_there,
    require_checkout,
    write_result,
)
from troupe.orchestrator.insight.replay.plan import plan_replay, spec_of
from troupe.orchestrator.insight.replay.repeat import Repeated, software_changes, start_problem
from troupe.orchestrator.insight.replay.resample import compare_samples, first_difference, plan_resample
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.machine import RESOLVED_SPEC
from troupe.orchestrator.spec.load import load_rollout_spec, plan_runs, read_document
from troupe.orchestrator.training.batch import GroupOrigin
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.micro_batches import minibatches, plan_texts
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.step_record import REPLAY, STEP, StepRecord, folder_of, packed_texts, read_step
from troupe.workers.contract.messages import KEPT_BATCH, TRAIN, KeptFile, TrainRow
from troupe.workers.data.step_record import write_tables

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
        groups=(GroupOrigin("e0-r3", 3, 2, step - 1, step - 1),),
        files={KEPT_BATCH: KeptFile(0, "")},
        before={"policy": f"w{step - 1}"},
        after={"policy": f"w{step}"},
        updates=({"policy/loss": 0.5, "policy/kl": math.nan},),
    )
    return kept.model_copy(update=changes)


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
    weights = {"policy": {"embed": "1", "norm": "2", "head": "3"}, "critic": {"score": "4"}}
    updates = ({"policy/loss": 0.5, "policy/kl": math.nan},)
    step = Repeated(7, {"policy": "a"}, {"policy": "a"}, updates, updates, 0.1, weights)
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


def test_the_first_parameter_that_differs_is_in_the_order_of_the_model() -> None:
    there = StepThere(step=7, equal=True, weights={"policy": {"embed": "1", "norm": "0", "head": "0"}}, updates=[])
    found = difference(repeated(weights={"policy": repeated().weights["policy"]}), there)
    assert found is not None
    assert (found.step, found.names, found.parameters) == (7, {"policy": ["norm", "head"]}, {"policy": 3})
    same = StepThere(step=7, equal=True, weights={k: dict(v) for k, v in repeated().weights.items()}, updates=[])
    assert difference(repeated(), same) is None


def test_only_a_checkout_with_the_command_is_compared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkout of Troupe"):
        require_checkout(tmp_path)
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator" / "cli.py").write_text("")
    with pytest.raises(UsageError, match="this version has no `troupe replay`"):
        require_checkout(tmp_path)
    assert require_checkout(ROOT) == ROOT == own_root()


def test_a_checkout_is_found_through_links_and_parent_folders(tmp_path: Path) -> None:
    """With `-m`, Python imports from the working folder without links and `..`."""
    root = scripted_checkout(tmp_path, "")
    (root / "orchestrator" / "commands").mkdir()
    (root / "orchestrator" / "commands" / "replay.py").write_text("")
    (tmp_path / "link").symlink_to(root)
    for number, path in enumerate((tmp_path / "link", root / ".." / root.name)):
        folder = tmp_path / f"result-{number}"
        folder.mkdir()
        found = replay_there(require_checkout(path), tmp_path, 7, folder, 30.0)
        assert found.root == str(root)


def scripted_checkout(tmp_path: Path, script: str) -> Path:
    """A checkout whose command line is a script that says where it was imported from and what it was asked."""
    write_result(tmp_path / "wanted.json", [repeated()])
    package = tmp_path / "there" / "orchestrator"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        "import pathlib, sys, json\n"
        "asked = dict(zip(sys.argv[3::2], sys.argv[4::2]))\n"
        f"found = json.loads(pathlib.Path({str(tmp_path / 'wanted.json')!r}).read_text())\n"
        "found['root'] = str(pathlib.Path(__file__).parent.parent)\n"
        f"{script}\n"
        "pathlib.Path(asked['--result']).write_text(json.dumps(found | {'added later': 1}))\n"
    )
    return package.parent


def test_another_checkout_runs_its_own_code(tmp_path: Path) -> None:
    root = scripted_checkout(
        tmp_path,
        "if asked['--step'] == '3': sys.exit('no such step')\n"
        "if asked['--step'] == '4': import time; time.sleep(60)\n"
        "if asked['--step'] == '5': found['root'] = '/elsewhere'",
    )

    def there(step: int, timeout_s: float = 30.0):
        folder = tmp_path / f"result-{step}"
        folder.mkdir()
        return replay_there(root, tmp_path, step, folder, timeout_s)

    found = there(7)
    assert found.steps[0].weights == repeated().weights and found.steps[0].equal
    with pytest.raises(TroupeError, match=r"failed \(exit code 1\):\n  no such step"):
        there(3)
    with pytest.raises(TroupeError, match=r"took longer than 2 s"):
        there(4, 2.0)
    with pytest.raises(TroupeError, match=r"was to use .*, and used /elsewhere"):
        there(5)


def test_a_step_is_sampled_again_with_the_versions_that_sampled_it(tmp_path: Path, keep: Keep) -> None:
    origins = [("a", 3, 3), ("b", 2, 2), ("c", 3, 3), ("d", 2, 3)]
    groups = tuple(GroupOrigin(uid, row, 8, *versions) for row, (uid, *versions) in enumerate(origins))
    for step in (1, 2, 3):
        keep(step)
    keep(4, groups=groups)
    for step in (2, 3):
        save(tmp_path, step)
    plan = plan_resample(tmp_path, 4)
    assert {version: [group.prompt_uid for group in found] for version, found in plan.groups.items()} == {
        2: ["b"],
        3: ["a", "c"],
    }
    assert plan.mixed == 1
    assert plan.replay.checkpoint is not None and plan.replay.checkpoint.step == 2
    assert [folder.kept.step for folder in plan.replay.folders] == [3]


def test_offline_steps_and_mixed_groups_have_nothing_to_sample(tmp_path: Path, keep: Keep) -> None:
    (planned,) = plan_runs(read_document(SPECS / "tiny-dpo.yaml"))
    keep(1, planned.spec, groups=())
    with pytest.raises(UsageError, match="trained on offline data: it has no samples"):
        plan_resample(tmp_path, 1)
    keep(2, groups=(GroupOrigin("a", 0, 8, 0, 1),))
    with pytest.raises(UsageError, match=r"no group was sampled by one version of the weights alone \(1 were not\)"):
        plan_resample(tmp_path, 2)


def sample(uid: str, index: int, *tokens: int, logprob: float = -1.0) -> dict[str, Any]:
    """A row of a TRAIN table."""
    return {
        "prompt_uid": uid,
        "sample_index": index,
        "attempt": 0,
        "segment": 0,
        "prompt_ids": [1, 2],
        "reward": 0.0,
        "response_ids": tokens,
        "loss_mask": [True] * len(tokens),
        "rollout_logprobs": [logprob] * len(tokens),
        "advantages": [0.0] * len(tokens),
    }


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=TRAIN)


def test_the_first_token_that_differs_is_named(tmp_path: Path, keep: Keep) -> None:
    groups = (GroupOrigin("a", 0, 2, 0, 0), GroupOrigin("b", 1, 2, 0, 0), GroupOrigin("c", 2, 2, 0, 1))
    keep(1, groups=groups)
    plan = plan_resample(tmp_path, 1)
    recorded = table(sample("a", 0, 5, 6, 7), sample("a", 1, 5, 6), sample("b", 0, 8), sample("c", 0, 1))
    again = [table(sample("b", 0, 8)), table(sample("a", 0, 5, 9, 7, logprob=-1.25), sample("a", 1, 5, 6, 4))]
    found = compare_samples(plan, recorded, again)
    assert (found.samples, found.largest_gap, found.mixed, found.equal) == (3, 0.25, 1, False)
    assert found.differences == (
        "a sample 0, token 1 of the response: 6 (log-prob -1.000000) in the run, 9 (log-prob -1.250000) here",
        "a sample 1, token 2 of the response: the end in the run, 4 (log-prob -1.000000) here",
    )
    assert found.lines()[0] == "step 1: 1 of 3 samples have the tokens of the run"
    with pytest.raises(UsageError, match="the prompt of a is not that of the run"):
        compare_samples(plan, recorded, [table(sample("a", 0, 5) | {"prompt_ids": [1]})])


@pytest.mark.parametrize(
    ("first", "second", "position"), [([], [], None), ([1], [1], None), ([1], [2], 0), ([1, 2], [1], 1), ([], [1], 0)]
)
def test_sequences_differ_where_one_ends(first: list[int], second: list[int], position: int | None) -> None:
    assert first_difference(first, second) == position

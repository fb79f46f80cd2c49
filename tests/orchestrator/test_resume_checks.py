"""What a resumed run says and refuses, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.runs.resume import require_same_rows, resumption
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.training.checkpoint import Checkpoint, TrainerLayout, stage_problem, trainer_layouts


def shipped(name: str, *overrides: str) -> RunSpec:
    return plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides))[0].spec


def lines(tmp_path: Path, before: RunSpec, after: RunSpec, state: dict[str, Any] | None = None) -> list[str]:
    file = tmp_path / "spec.yaml"
    before.write(file)
    written = file.read_text()
    try:
        return resumption(tmp_path, Checkpoint(3, tmp_path / "step-000003", state or {}), after, file).lines()
    finally:
        assert file.read_text() == written


def test_an_unchanged_spec_says_where_the_run_goes_on(tmp_path: Path) -> None:
    spec = shipped("tiny-ppo", "schedule.steps=7")
    assert lines(tmp_path, spec, spec) == [
        f"resuming after step 3 of 7 from {tmp_path}/step-000003; the spec is unchanged"
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("schedule.steps=9", "changed: schedule.steps: 7 -> 9"),
        (
            "roles.policy.learning_rate=0.5",
            "changed: roles.policy.learning_rate: 1.0e-05 -> 0.5 (from the next update on)",
        ),
        ("roles.policy.workers=2", "changed: roles.policy.workers: 1 -> 2 (optimizer states are resharded)"),
        ("sampling.temperature=0.5", "changed: sampling.temperature: 1.0 -> 0.5 (from the next step on)"),
        ("checkpoint.keep=9", "changed: checkpoint.keep: 3 -> 9"),
    ],
)
def test_an_allowed_change_is_shown_with_what_it_means(tmp_path: Path, override: str, line: str) -> None:
    base = ("schedule.steps=7", "checkpoint.keep=3", "roles.policy.learning_rate=1.0e-05", "roles.policy.workers=1")
    before, after = shipped("tiny-ppo", *base), shipped("tiny-ppo", *base, override)
    found = lines(tmp_path, before, after)
    assert found == [
        f"resuming after step 3 of {after.schedule.steps} from {tmp_path}/step-000003",
        line.replace("1.0e-05", "1e-05"),
    ]


def test_a_run_s_own_checkpoint_may_become_its_opponent(tmp_path: Path) -> None:
    first, path = tmp_path / "first", tmp_path / "step-000003" / "model"
    judge = f"roles.judge={{model: {{path: {first}}}, max_model_len: 128, max_tokens: 2}}"
    against = ("roles.environment.players={first: policy, second: judge}", judge)
    before = shipped("tiny-self-play", *against)
    found = lines(tmp_path, before, shipped("tiny-self-play", *against, f"roles.judge.model.path={path}"))
    assert found[1:] == [f"changed: roles.judge.model.path: {first} -> {path}"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.train.0.weight=5", "changed: data.train.0.weight: 2.0 -> 5.0 (from the next prompt on)"),
        (
            "data.train.0.solved_at=0.5",
            "changed: data.train.0.solved_at: 0.3 -> 0.5 (results so far count as they were)",
        ),
        ("data.train.1.size=9", "changed: data.train.1.size: 8 -> 9 (allowed where the rows are the same)"),
    ],
)
def test_what_a_changed_source_means_is_said(tmp_path: Path, override: str, line: str) -> None:
    assert lines(tmp_path, shipped("tiny-mixture"), shipped("tiny-mixture", override))[1:] == [line]


ADAPTS = {"tiny-ppo": ("algorithm.kl.coef", "algorithm.kl.target=6", "source", "kl")}
ADAPTS["ppo_penalty"] = ("algorithm.kl_old.coef", "algorithm.name=ppo_penalty", "memory", "kl_old")


def adapting(which: str) -> tuple[str, RunSpec, RunSpec, dict[str, Any]]:
    """A field whose coefficient adapts, two specs with 0.5 and 0.1, and a checkpoint where it has adapted to 0.25."""
    field, override, section, name = ADAPTS[which]
    saved = {f"{name}_coef": 0.25, f"{name}_start": 0.5}
    state = {"source": {"advantages": saved}} if section == "source" else {"memory": saved}
    before, after = (shipped("tiny-ppo", override, f"{field}={coef}") for coef in (0.5, 0.1))
    return field, before, after, state


@pytest.mark.parametrize("which", ADAPTS)
def test_a_new_coefficient_that_adapts_starts_from_there(which: str, tmp_path: Path) -> None:
    field, before, after, state = adapting(which)
    note = "from the next step on; a coefficient that adapts starts from it again"
    assert lines(tmp_path, before, after, state)[1:] == [f"changed: {field}: 0.5 -> 0.1 ({note})"]


def test_what_starts_again_with_other_sources_of_statistics_is_said(tmp_path: Path) -> None:
    base = ("algorithm.name=reinforce_pp_baseline", "algorithm.kl.coef=0")
    found = lines(tmp_path, shipped("tiny-mixture", *base), shipped("tiny-mixture", *base, "algorithm.by_source=false"))
    assert found[1].endswith("(from the next step on; running statistics start again)")


def test_a_learning_rate_schedule_is_named_where_it_gets_longer(tmp_path: Path) -> None:
    base = ("schedule.steps=7", "roles.policy.schedule=cosine")
    found = lines(tmp_path, shipped("tiny-ppo", *base), shipped("tiny-ppo", *base, "schedule.steps=9"))
    assert "the cosine learning-rate schedule extends over the new number of updates from step 4 on" in found[1]


@pytest.mark.parametrize(
    ("name", "override", "field"),
    [
        ("tiny-ppo", "seed=77", "seed"),
        ("tiny-ppo", "model.path=/other/model", "model.path"),
        ("tiny-ppo", "model.dtype=bfloat16", "model.dtype"),
        ("tiny-ppo", "roles.critic.model={path: /other}", "roles.critic.model"),
        ("tiny-ppo", "roles.policy.ema_decay=0.9", "roles.policy.ema_decay"),
        ("tiny-grpo", "roles.policy.lora={}", "roles.policy.lora"),
        ("tiny-lora", "roles.policy.lora.rank=4", "roles.policy.lora.rank"),
        ("tiny-lora", "roles.policy.lora.targets=[q_proj]", "roles.policy.lora.targets"),
        ("tiny-dpo", "data.max_length=333", "data.max_length"),
        ("tiny-mixture", "data.train.1.name=other", "data.train.1.name"),
        ("tiny-mixture", "data.train.1.group_size=2", "data.train.1.group_size"),
        ("tiny-dpo", "algorithm.name=ipo", "algorithm.name"),
    ],
)
def test_what_the_checkpoint_belongs_to_cannot_change(tmp_path: Path, name: str, override: str, field: str) -> None:
    before = shipped(name, "model.dtype=float32")
    with pytest.raises(UsageError) as refused:
        lines(tmp_path, before, shipped(name, "model.dtype=float32", override))
    head, line = str(refused.value).split("\n  ")
    assert head == f"cannot resume {tmp_path} at step 3 with this spec:"
    assert line.startswith(f"{field}: ") and ": refused: " in line


def test_a_run_of_another_kind_is_refused_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"spec:\n  algorithm\.name: dpo -> ppo: refused: [^\n]*$"):
        lines(tmp_path, shipped("tiny-dpo"), shipped("tiny-ppo"))


def test_without_a_readable_spec_only_the_step_is_said(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("nonsense: 1")
    found = resumption(tmp_path, Checkpoint(3, tmp_path, {}), shipped("tiny-ppo"), file).lines()
    assert len(found) == 1 and found[0].endswith("the folder has no spec to compare with")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved", range(4))
@pytest.mark.parametrize("now", range(4))
def test_a_zero_stage_loads_what_has_the_same_files(saved: int, now: int, dtype: str) -> None:
    problem = stage_problem(TrainerLayout(saved, 2, dtype), TrainerLayout(now, 2, dtype))
    converts = saved == now or {saved, now} == {1, 2} or (dtype == "float32" and 3 not in (saved, now))
    assert (problem == "") == converts
    assert not problem or (f"ZeRO stage {saved}" in problem and f"zero_stage: {saved}" in problem)


def test_another_zero_stage_is_refused_with_the_field_and_the_stage_that_wrote(tmp_path: Path) -> None:
    before = shipped("tiny-ppo", "roles.policy.zero_stage=1", "roles.policy.workers=2")
    after = shipped("tiny-ppo", "roles.policy.zero_stage=3", "roles.policy.workers=2")
    state = {"trainers": {role: vars(layout) for role, layout in trainer_layouts(before).items()}}
    with pytest.raises(UsageError, match=r"roles\.policy\.zero_stage: .* written with ZeRO stage 1 \(2 worker"):
        lines(tmp_path, before, after, state)
    assert lines(tmp_path, before, before, state)


@pytest.mark.parametrize(("size", "workers"), [(1, 4), (2, 2)])
def test_experts_that_were_divided_otherwise_are_refused(tmp_path: Path, size: int, workers: int) -> None:
    def spec(size: int, workers: int) -> RunSpec:
        given = {"workers": workers, "zero_stage": 3, "expert_parallel_size": size}
        return shipped("tiny-ppo", *(f"roles.policy.{name}={value}" for name, value in given.items()))

    before = spec(2, 4)
    state = {"trainers": {role: vars(layout) for role, layout in trainer_layouts(before).items()}}
    assert lines(tmp_path, before, before, state)
    with pytest.raises(UsageError, match=r"roles\.policy\.expert_parallel_size: .* expert_parallel_size 2 by 4 worker"):
        lines(tmp_path, before, spec(size, workers), state)
    # Checkpoints of earlier versions do not say how experts were divided: they were not.
    earlier = {"trainers": {role: {"zero_stage": 3, "workers": 4, "dtype": "float32"} for role in ("policy",)}}
    with pytest.raises(UsageError, match=r"written with expert_parallel_size 1 by 4"):
        lines(tmp_path, spec(1, 4), before, earlier)


def test_other_rows_are_refused(tmp_path: Path) -> None:
    found = Checkpoint(2, tmp_path, {"source": {"digest": "a"}})
    require_same_rows(None, lambda state: [("data.train", state, "b")])
    require_same_rows(found, lambda state: [("data.train", state, "a"), ("data.ptx", {}, "b")])
    with pytest.raises(UsageError, match=r"data\.train: cannot resume: .* \(digest a, now b\)"):
        require_same_rows(found, lambda state: [("data.train", state, "b")])

"""The table of other trainers' settings: its fields exist, its names are real, and it answers for unknown fields."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from troupe.orchestrator.spec.errors import SpecError, known_paths
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.migration import settings
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec

SPEC = """\
name: run
model: {path: models/m}
roles:
  rollout: {}
  policy: {}
  reward: {functions: [{name: exact_match}]}
algorithm: {name: grpo}
schedule: {steps: 5, prompts_per_step: 8}
data: {train: {kind: jsonl, path: train.jsonl}}
"""
DPO = """\
name: run
model: {path: models/m}
roles: {policy: {}, reference: {colocate_with: policy}}
algorithm: {name: dpo}
schedule: {steps: 5, examples_per_step: 8}
data: {train: {kind: jsonl, path: train.jsonl}}
"""


def test_every_field_of_the_table_exists_and_what_has_none_says_why() -> None:
    known = {*known_paths(RolloutSpec), *known_paths(OfflineSpec)}
    for row in settings():
        assert set(row.troupe) <= known, row.what
        assert row.troupe or row.note, row.what
        assert row.verl or row.openrlhf or row.trl, row.what


def test_names_have_the_form_of_their_trainer_and_no_further_name_stands_twice() -> None:
    for row in settings():
        assert all(name.startswith("--") for name in row.openrlhf), row.what
        assert not any(name.startswith("-") for name in (*row.verl, *row.trl, *row.keys)), row.what
    online = [key for row in settings() if row.section != "Offline training" for key in row.keys]
    assert len(online) == len(set(online))


def names_of(package: str) -> set[str]:
    """Fields of configuration classes and parameters of trainers in the source of an installed package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    root = Path(found.origin).parent
    names: set[str] = set()
    for file in (*root.glob("trainer/*.py"), *root.glob("training_args.py"), *root.glob("scripts/utils.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                names |= {target.id for target in fields if isinstance(target, ast.Name)}
            elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                names |= {argument.arg for argument in node.args.args}
    return names


def test_names_of_trl_are_those_of_the_installed_one() -> None:
    known = names_of("trl") | names_of("transformers")
    assert {name for row in settings() for name in row.trl} <= known


def problem(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        plan_runs(read_document(path, overrides))
    (line,) = str(caught.value).splitlines()
    return line.partition(": ")[2]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lora_rank=8", "lora_rank: unknown field (did you mean 'roles.policy.lora.rank'?)"),
        ("lora_alpha=8", "lora_alpha: unknown field (did you mean 'roles.policy.lora.alpha'?)"),
        ("lora_dropout=0.1", "lora_dropout: unknown field (it must be 0)"),
        ("total_epochs=3", "total_epochs: unknown field (did you mean 'schedule.data_epochs'? `schedule.epochs` are"),
        ("total_training_steps=3", "total_training_steps: unknown field (did you mean 'schedule.steps'?)"),
        ("actor_rollout_ref={rollout: {top_k: 20}}", "actor_rollout_ref: unknown field (rollout.top_k: did you mean"),
        (
            "sampling.repetition_penalty=1.1",
            "sampling.repetition_penalty: unknown field (penalties and biases change the",
        ),
        ("lr=1e-6", "lr: unknown field (did you mean 'roles.policy.learning_rate'?)"),
        ("roles.policy.lr=1e-6", "roles.policy.lr: unknown field (did you mean 'learning_rate'?)"),
        ("roles.policy.optim={lr: 1e-6}", "roles.policy.optim: unknown field (lr: did you mean 'roles.policy."),
        (
            "roles.policy.optimizer=adam",
            "roles.policy.optimizer: unknown field (trainers use AdamW; its settings, such",
        ),
        ("rollout.n=8", "rollout: unknown field (n: did you mean 'algorithm.group_size'?)"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef: unknown field (did you mean 'kl.coef'? the algorithm puts it in"),
        ("algorithm.beta=0.1", "algorithm.beta: unknown field (did you mean 'kl.coef'?"),
        ("roles.critic={lr: 1e-5}", "roles.critic.lr: unknown field (did you mean 'learning_rate'?)"),
        ("num_generations=4", "num_generations: unknown field (did you mean 'algorithm.group_size'?)"),
        (
            "actor_rollout_ref={actor: {clip_ratio: 0.2, ppo_epochs: 2}, rollout: {temperature: 1.0, n: 4}}",
            "actor_rollout_ref: unknown field (actor.clip_ratio: did you mean 'algorithm.clip_range'?, "
            "actor.ppo_epochs: did you mean 'schedule.epochs'?, "
            "rollout.temperature: did you mean 'sampling.temperature'?)",
        ),
        ("roles.policy.learning_rat=1e-6", "roles.policy.learning_rat: unknown field (did you mean 'learning_rate'?)"),
        (
            "roles.rollout.kv_cache_dtype=fp8",
            "roles.rollout.kv_cache_dtype: unknown field (vLLM's own options are in 'engine')",
        ),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_the_field(override: str, expected: str, tmp_path: Path) -> None:
    assert problem(tmp_path, SPEC, override).startswith(expected)


def test_an_offline_spec_is_answered_with_its_own_fields(tmp_path: Path) -> None:
    assert (
        problem(tmp_path, DPO, "beta=0.2")
        == "beta: unknown field (it belongs at algorithm.beta or algorithm.distill.beta)"
    )
    assert "did you mean 'schedule.examples_per_step'?" in problem(tmp_path, DPO, "per_device_train_batch_size=8")
    assert "did you mean 'data.max_length'?" in problem(tmp_path, DPO, "max_seq_length=8")

"""The difficulty of generated tasks in a first spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reasoning_gym
import yaml

from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.starter import command, difficulty
from troupe.orchestrator.starter.choices import Choices, Difficulty
from troupe.orchestrator.starter.command import text_of, with_difficulty
from troupe.orchestrator.starter.difficulty import best_level, has_levels, task_levels, trained_tasks, why_not_tried
from troupe.workers.isolation.probe import ProbeTimeout


def test_levels_follow_the_curriculum_from_the_easiest() -> None:
    levels = task_levels("chain_sum")
    assert levels[0] | {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1} == levels[0]
    assert [level["max_digits"] for level in levels] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("task", ["chain_sum", "knight_swap", "survo", "composite"])
def test_every_level_makes_tasks(task: str) -> None:
    """Also where some levels of a curriculum are outside of what the task takes, and where it has none."""
    for level in task_levels(task):
        if level:
            assert reasoning_gym.create_dataset(task, size=1, seed=1, **level)[0]["question"]


@pytest.mark.parametrize(
    ("right", "chosen", "mixed"),
    [
        ([[0, 0, 0, 0]], 0, 0),
        ([[8, 8, 8, 8], [4, 0, 2, 8], [0, 0, 1, 0]], 1, 2),
        ([[8, 8, 7, 8], [8, 8, 8, 1]], 0, 1),
    ],
)
def test_the_level_with_the_most_to_learn_from_is_chosen(right: list[list[int]], chosen: int, mixed: int) -> None:
    levels: list[dict[str, Any]] = [{"level": number} for number in range(5)]
    found = best_level(levels, right)
    assert (found.settings, found.mixed, found.right) == ({"level": chosen}, mixed, sum(right[chosen]))
    assert ("there is nothing to learn" in found.note) == (mixed == 0)
    assert ("try a larger model or an easier task" in found.note) == (found.right == 0)


def test_tasks_are_left_to_evaluate_on_where_there_are_few(tiny_model: Path, tmp_path: Path) -> None:
    easiest = task_levels("chain_sum")[0]
    tasks = trained_tasks("chain_sum", easiest)
    assert 32 < tasks < 200 and trained_tasks("chain_sum", task_levels("chain_sum")[4]) == 2000
    found = Difficulty(easiest, 1, 64, 1, 8, tasks)
    choices = Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2, difficulty=found)
    (tmp_path / "run.yaml").write_text(text_of(choices, tmp_path / "run.yaml"))
    pools = load_data(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec).pools
    assert pools["train"].rows == tasks and pools["eval"].rows >= 32


def test_the_spec_has_the_difficulty_and_what_the_model_solved(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Difficulty({"min_terms": 2, "max_terms": 3}, 11, 64, 5, 8)
    monkeypatch.setattr(command, "find_difficulty", lambda choices: found)
    said: list[str] = []
    choices = with_difficulty(Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2), said.append)
    assert said[-1] == (
        "difficulty: the model solves 11 of 64 samples, and 5 of 8 prompts have right and wrong ones to learn from"
    )
    text = text_of(choices, tmp_path / "run.yaml")
    data = yaml.safe_load(text)["data"]
    assert data["train"]["recipes"] == data["eval"]["recipes"] == [{"name": "chain_sum", "args": found.settings}]
    assert "# Difficulty: the model solves 11 of 64 samples" in text


def test_only_the_difficulty_of_generated_tasks_is_tried(tiny_model: Path) -> None:
    generated = Choices(str(tiny_model), "reasoning_gym:chain_sum")
    assert has_levels(generated) and not has_levels(replace(generated, data="train.jsonl"))
    assert not has_levels(replace(generated, algorithm="dpo"))
    assert not has_levels(replace(generated, environment="gym"))


@pytest.mark.parametrize(
    ("billions", "gpu_gib", "why"),
    [
        (2.0, 0, ""),
        (2.1, 0, "the model has 2.1 billion parameters and this machine no GPU"),
        (7.0, 80, ""),
        (72.0, 80, "the model needs 201 GiB and the GPU of this machine has 80"),  # 1.5 x 2 bytes x 72e9 / 2**30
    ],
)
def test_a_large_model_is_tried_on_a_gpu_that_it_fits(
    billions: float, gpu_gib: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difficulty, "read_size", lambda folder: SimpleNamespace(parameters=int(billions * 1e9)))
    assert why_not_tried(str(tmp_path), gpu_gib * 2**30) == why


def test_a_difficulty_that_is_not_tried_is_said_and_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the size of the model is not known" in why_not_tried(str(tmp_path), 0)
    monkeypatch.setattr(command, "why_not_tried", lambda model, gpu_bytes: "the machine has no GPU")
    monkeypatch.setattr(command, "find_difficulty", lambda choices: pytest.fail("tried"))
    said: list[str] = []
    choices = with_difficulty(Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2), said.append)
    assert said == ["difficulty: not tried: the machine has no GPU"]
    text = text_of(choices, tmp_path / "run.yaml")
    assert "# Difficulty: that of the task, not tried: the machine has no GPU.\n" in text


@pytest.mark.parametrize("sampled", [[], [[0, 3, 8, 8, 8, 8, 8, 8]]])
def test_a_slow_trial_ends_and_what_was_sampled_decides(
    sampled: list[list[int]], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(entry: str, request: object, timeout_s: float) -> list[object]:
        raise ProbeTimeout(f"did not end within {timeout_s:g} s", list(sampled))

    monkeypatch.setattr(difficulty, "ask", slow)
    said: list[str] = []
    choices = with_difficulty(Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2), said.append)
    assert "at most 4 minutes" in said[0]
    assert (choices.difficulty is None) is (not sampled)
    assert ("51 of 64" in said[1]) if sampled else ("not tried: the model did not sample 64 responses" in said[1])
    assert text_of(choices, tmp_path / "run.yaml")

"""The difficulty of generated tasks in a first spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import yaml

from troupe.orchestrator.data.summary import read_pools
from troupe.orchestrator.spec.stages import plan_runs, read_document
from troupe.orchestrator.starter import command
from troupe.orchestrator.starter.choices import Choices, Difficulty
from troupe.orchestrator.starter.command import text_of, with_difficulty
from troupe.orchestrator.starter.difficulty import best_level, is_tried, task_levels, trained_tasks


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


def test_tasks_are_left_to_evaluate_on_where_there_are_few(tiny_model: Path, tmp_path: Path) -> None:
    easiest = task_levels("chain_sum")[0]
    tasks = trained_tasks("chain_sum", easiest)
    assert 32 < tasks < 200 and trained_tasks("chain_sum", task_levels("chain_sum")[4]) == 2000
    found = Difficulty(easiest, 1, 64, 1, 8, tasks)
    choices = Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2, difficulty=found)
    (tmp_path / "run.yaml").write_text(text_of(choices, tmp_path / "run.yaml"))
    pools = read_pools(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec)
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


def test_only_small_models_and_generated_tasks_are_tried(tiny_model: Path, tmp_path: Path) -> None:
    assert is_tried(Choices(str(tiny_model), "reasoning_gym:chain_sum"))
    assert not is_tried(Choices(str(tiny_model), "train.jsonl"))
    assert not is_tried(Choices(str(tmp_path), "reasoning_gym:chain_sum"))

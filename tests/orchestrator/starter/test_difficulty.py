"""The difficulty of generated tasks in a first spec."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import reasoning_gym
import yaml

from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.starter import data as starter_data
from troupe.orchestrator.starter.choices import Choices
from troupe.orchestrator.starter.command import text_of
from troupe.orchestrator.starter.data import easiest, trained_tasks


def test_the_easiest_settings_are_the_first_level_of_the_curriculum() -> None:
    settings = easiest("chain_sum")
    assert settings | {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1} == settings


@pytest.mark.parametrize("task", ["chain_sum", "knight_swap", "survo", "composite"])
def test_the_easiest_settings_make_tasks(task: str) -> None:
    """Also if a curriculum is outside of what the task takes, and if there is none."""
    if settings := easiest(task):
        assert reasoning_gym.create_dataset(task, size=1, seed=1, **settings)[0]["question"]


def test_tasks_are_left_to_evaluate_on_where_there_are_few(tiny_model: Path, tmp_path: Path) -> None:
    settings = easiest("chain_sum")
    tasks = trained_tasks("chain_sum", settings)
    assert 32 < tasks < 200 and trained_tasks("chain_sum", settings | {"max_digits": 5}) == 2000
    said: list[str] = []
    choices = Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2)
    (tmp_path / "run.yaml").write_text(text := text_of(choices, tmp_path / "run.yaml", said.append))
    data = yaml.safe_load(text)["data"]
    assert data["train"]["recipes"] == data["eval"]["recipes"] == [{"name": "chain_sum", "args": settings}]
    assert "easiest of their kind" in said[0] and f"# {said[0]}" in text
    pools = load_data(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec).pools
    assert pools["train"].rows == tasks and pools["eval"].rows >= 32


def test_a_large_model_gets_the_default_settings(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter_data, "read_size", lambda folder: SimpleNamespace(parameters=7_000_000_000))
    data = yaml.safe_load(text_of(Choices(str(tiny_model), "reasoning_gym:chain_sum", cpus=2), tmp_path / "a"))["data"]
    assert (data["train"]["recipes"], data["train"]["size"]) == ([{"name": "chain_sum"}], 2000)

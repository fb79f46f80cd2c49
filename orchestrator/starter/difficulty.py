"""Data of generated tasks for a first spec, as easy as a small model needs them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from troupe.orchestrator.data.readers import json_safe
from troupe.orchestrator.model_facts.model_size import SizeUnknown, read_size
from troupe.orchestrator.starter.choices import GYM, Choices, Data, Earned

_SMALL = 1_000_000_000
"""Parameters up to which a model gets a task's easiest settings; of the default ones it would solve next to none."""
_TASKS = 2000
"""Generated tasks to train on."""


def generated_data(choices: Choices) -> Data:
    """Generated tasks to train and evaluate on."""
    task = choices.data.removeprefix(GYM)
    recipe: dict[str, Any] = {"name": task}
    tasks, notes = _TASKS, ()
    if _is_small(choices.model) and (settings := easiest(task)):
        recipe["args"], tasks = settings, trained_tasks(task, settings)
        notes = ("The tasks are the easiest of their kind, for a small model: `args` of the recipe makes them harder.",)
    train = {"kind": "reasoning_gym", "recipes": [recipe], "size": tasks, "seed": 1}
    section = {"train": train, "eval": train | {"size": 200, "seed": 2}}
    return Data(section, 512, 0, Earned("reasoning_gym"), notes=notes)


def _is_small(model: str) -> bool:
    try:
        return read_size(Path(model)).parameters <= _SMALL
    except SizeUnknown:
        return False


def trained_tasks(task: str, settings: Mapping[str, Any]) -> int:
    """Tasks to train on: half of the different ones if there are few, because a task is not evaluated on as well."""
    made = importlib.import_module("reasoning_gym").create_dataset(task, size=_TASKS, seed=0, **settings)
    different = len({entry["question"] for entry in made})
    return _TASKS if different > _TASKS // 2 else max(1, different // 2)


def easiest(task: str) -> dict[str, Any]:
    """Settings of a task at the first level of its curriculum; empty if it has none that the task takes."""
    factory = importlib.import_module("reasoning_gym.factory")
    if not factory.has_curriculum(task):
        return {}
    try:
        config = factory.create_curriculum(task).generate_configuration({"seed": 0})
        config.validate()
    except Exception:  # a curriculum may leave the bounds of the task, which raises anything
        return {}
    fields = [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")]
    return json_safe({name: getattr(config, name) for name in fields})

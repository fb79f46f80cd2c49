"""Chooses the difficulty of generated tasks for a first spec: one at which the model is sometimes right."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troupe.orchestrator.data.readers import json_safe
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.model_facts.model_size import SizeUnknown, read_size
from troupe.orchestrator.starter.choices import GYM, TASKS, Choices, Difficulty
from troupe.orchestrator.starter.sizing import response_tokens
from troupe.workers.contract.units import GIB
from troupe.workers.isolation.probe import ProbeFailed, ProbeTimeout, ask

PROMPTS, SAMPLES = 8, 8

_TRIAL = "troupe.workers.rewards.trials:sample_levels"
_LEVELS = 5
_MOST_PARAMETERS = 2_000_000_000
"""Most parameters of a model that is tried without a GPU."""
_ROOM = 1.5
"""Memory of a GPU that a trial takes, in sizes of the weights: these, the cache of 64 short sequences, activations."""
BUDGET_S = 240.0
"""Time for the trial. What was sampled until then decides."""


def has_levels(choices: Choices) -> bool:
    """Whether the tasks are generated ones, whose difficulty can be chosen."""
    return choices.data.startswith(GYM) and not choices.offline and not choices.environment


def why_not_tried(model: str, gpu_bytes: int) -> str:
    """Why a model cannot be sampled from on this machine; empty if it can.

    Args:
        model: Its folder.
        gpu_bytes: Memory of this machine's first GPU; 0 without one. (`--gpus` may describe another machine.)
    """
    try:
        parameters = read_size(Path(model)).parameters
    except SizeUnknown as error:
        return f"the size of the model is not known ({error})"
    if parameters <= _MOST_PARAMETERS:
        return ""
    if not gpu_bytes:
        return f"the model has {parameters / 1e9:.1f} billion parameters and this machine no GPU"
    needed = int(_ROOM * 2 * parameters)  # in bfloat16
    if needed > gpu_bytes:
        return f"the model needs {needed / GIB:.0f} GiB and the GPU of this machine has {gpu_bytes / GIB:.0f}"
    return ""


def find_difficulty(choices: Choices) -> Difficulty | str:
    """Samples a few prompts of each level, the easiest first, and chooses the level with the most to learn from.

    Returns:
        The level, or why none was tried in time.

    Raises:
        UsageError: The model cannot be sampled from.
    """
    task = choices.data.removeprefix(GYM)
    levels = task_levels(task)
    request = {
        "model": choices.model,
        "task": task,
        "levels": levels,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_tokens": response_tokens(choices),
        "enough": PROMPTS // 2,
    }
    try:
        found = ask(_TRIAL, request, BUDGET_S)
    except ProbeTimeout as error:
        found = error.replies
        if not found:
            return f"the model did not sample {PROMPTS * SAMPLES} responses within {BUDGET_S:.0f} s"
    except ProbeFailed as error:
        advice = "--no-trial leaves the trial out"
        raise UsageError(f"--data: {task} cannot be tried on {choices.model} ({advice}): {error}") from None
    chosen = best_level(levels, found)
    return replace(chosen, tasks=trained_tasks(task, chosen.settings))


def trained_tasks(task: str, settings: Mapping[str, Any]) -> int:
    """Tasks to train on: half of the different ones if there are few, because a task is not evaluated on as well."""
    made = importlib.import_module("reasoning_gym").create_dataset(task, size=TASKS, seed=0, **settings)
    different = len({entry["question"] for entry in made})
    return TASKS if different > TASKS // 2 else max(1, different // 2)


def best_level(levels: Sequence[dict[str, Any]], right: Sequence[Sequence[int]]) -> Difficulty:
    """The level with the most prompts that have right and wrong samples; the first of several.

    Args:
        levels: Settings of the task, the easiest first.
        right: For each level that was tried, how many of the `SAMPLES` samples of each prompt are right.
    """
    mixed = [sum(0 < count < SAMPLES for count in counts) for counts in right]
    chosen = mixed.index(max(mixed))
    counts = right[chosen]
    return Difficulty(levels[chosen], sum(counts), SAMPLES * len(counts), mixed[chosen], len(counts))


def task_levels(task: str) -> list[dict[str, Any]]:
    """Settings of a task by its curriculum, the easiest first; one empty level if it has none."""
    factory = importlib.import_module("reasoning_gym.factory")
    if not factory.has_curriculum(task):
        return [{}]
    curriculum = factory.create_curriculum(task)
    found: list[dict[str, Any]] = []
    for level in range(_LEVELS):
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
        try:
            config = curriculum.generate_configuration({"seed": 0})
            config.validate()
        except Exception:  # a curriculum may leave the bounds of the task, which raises anything
            continue
        fields = [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")]
        settings = json_safe({name: getattr(config, name) for name in fields})
        found += [settings] if settings not in found else []
    return found or [{}]

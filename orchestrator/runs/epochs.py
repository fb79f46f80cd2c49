"""Counts the steps of a run whose length is given as passes over its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from troupe.orchestrator.algorithms.section import dynamic_sampling
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.derived.paths import hub_data, with_sections
from troupe.orchestrator.spec.epochs import FIELD, given_epochs, in_steps
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import parse_spec, plan_runs
from troupe.orchestrator.spec.sources import HubFiles
from troupe.orchestrator.spec.yaml_reader import Document

Say = Callable[[str], object]
"""Called with a line for each step that takes long."""

_MANY_STEPS = 1_000_000
"""Steps of a spec whose data are counted: above every field that must be less than them."""


def plan_counted(document: Document, say: Say, out: Path | None = None) -> tuple[PlannedRun, ...]:
    """Every run of a file, in order. Reads the data of runs with `schedule.data_epochs`, and says their steps. Raises
    as `plan_runs`; SpecError also if a pass over the data is no known number of steps."""
    return plan_runs(document, out, partial(_parse, say=say))


def _parse(document: Document, say: Say) -> RunSpec:
    epochs = given_epochs(document)
    if epochs is None:
        return parse_spec(document)
    spec = parse_spec(in_steps(document, _MANY_STEPS))
    if why := _unknown(spec):
        raise SpecError([document.source.problem(FIELD, f"{why}: set schedule.steps")])
    try:
        rows, commits = _counted(spec, say)
    except DataError as error:
        raise SpecError([document.source.problem("data", str(error), "unusable")]) from None
    field, batch = "examples" if spec.rollouts is None else "prompts", spec.schedule.rows_per_step
    steps = math.ceil(rows * epochs / batch)
    say(f"{spec.name}: {steps} steps (data_epochs {epochs:g} x {rows} rows / {field}_per_step {batch})")
    return with_sections(parse_spec(in_steps(document, steps)), commits)


def _counted(spec: RunSpec, say: Say) -> tuple[int, Mapping[str, HubFiles]]:
    """Rows of the training data, and the sections on the hub at the commits that were counted. Raises DataError."""
    from troupe.orchestrator.data.summary import load_data

    on_hub = hub_data(spec)
    if not on_hub:
        return load_data(spec).train.rows, {}
    from troupe.orchestrator.hub.resolve import HubError, NoFiles, with_files

    say(
        f"{spec.name}: downloading {', '.join(sorted({one.dataset_name for one in on_hub.values()}))} to count its rows"
    )
    try:
        here = {section: with_files(source) for section, source in on_hub.items()}
    except (HubError, NoFiles) as error:
        raise DataError(str(error)) from None
    commits = {
        section: source.model_copy(update={"revision": here[section].revision}) for section, source in on_hub.items()
    }
    return load_data(with_sections(spec, here)).train.rows, commits


def _unknown(spec: RunSpec) -> str:
    """Why nobody knows how many steps a pass over the data takes; empty if it is known."""
    if (spec.rollouts or spec.offline).data.mixture:
        return "the sources of a mixture have separate passes"
    if spec.rollouts is not None and spec.rollouts.data.curriculum is not None:
        return "with data.curriculum a pass leaves prompts out by their results"
    if spec.rollouts is not None and dynamic_sampling(spec.rollouts.algorithm):
        return "with algorithm.dynamic_sampling a step draws more prompts than it trains on"
    return ""

"""The points of a sweep: every combination of the swept fields, as specs, and which of them share engines."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from troupe.orchestrator.algorithms.section import AlgorithmConfig
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.roles.settings import rollout_config
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.paths import without_adapters
from troupe.orchestrator.spec.errors import Place, Problem, SpecError
from troupe.orchestrator.spec.field_tree import live_names
from troupe.orchestrator.spec.rollout import RolloutSpec

SWEEP = "--sweep"
MOST_POINTS = 256
WORKERS = "roles.rollout.workers"


@dataclass(frozen=True)
class Sweep:
    """The values of one field."""

    field: str
    """Its dotted path in the spec."""
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    """One combination of values."""

    settings: Mapping[str, Any]
    """The swept fields, by dotted path; empty without a sweep."""
    spec: RolloutSpec

    @property
    def label(self) -> str:
        return settings_label(self.settings)

    @property
    def lines(self) -> tuple[str, ...]:
        """The settings as lines for a spec: `roles.rollout.workers: 2`."""
        return tuple(f"{field}: {value_text(value)}" for field, value in self.settings.items())

    @property
    def workers(self) -> int:
        return self.spec.roles.rollout.workers


def settings_label(settings: Mapping[str, Any]) -> str:
    """Fields and their values as text, with the fields' last names where these differ."""
    names = Counter(field.rpartition(".")[2] for field in settings)
    texts = {field: field if names[field.rpartition(".")[2]] > 1 else field.rpartition(".")[2] for field in settings}
    return ", ".join(f"{texts[field]} {value_text(value)}" for field, value in settings.items())


def parse_sweep(text: str, option: str = SWEEP) -> Sweep:
    """Parse `roles.rollout.workers=1,2,4`, the value of a command line's option. Raises SpecError."""
    field, equals, values = text.partition("=")
    field = field.strip()
    if not equals or not field or not values.strip():
        raise SpecError([Problem(Place(option), "", f"expected FIELD=VALUE,VALUE,..., got {text[:60]!r}")])
    try:
        found = yaml_reader.parse(f"[{values}]", option).data
    except SpecError as error:
        raise SpecError([replace(problem, place=Place(option), path=field) for problem in error.problems]) from None
    return Sweep(field, tuple(found))


def grid(load: Callable[[list[str]], RunSpec], sweeps: Sequence[Sweep], prompts: int | None = None) -> list[Point]:
    """Every combination of the swept values. Raises SpecError if one is invalid or a field does not concern
    rollouts; UsageError without rollouts, or if the sweep is too large."""
    fields = [sweep.field for sweep in sweeps]
    if repeated := {field for field in fields if fields.count(field) > 1}:
        raise UsageError(f"{SWEEP} {repeated.pop()} is given twice")
    combinations = list(itertools.product(*(sweep.values for sweep in sweeps)))
    if len(combinations) > MOST_POINTS:
        raise UsageError(f"{SWEEP}: {len(combinations)} points are more than {MOST_POINTS}")
    points = [_point(load, dict(zip(fields, values, strict=True)), prompts) for values in combinations]
    problems = [
        Problem(Place(SWEEP), sweep.field, "rollouts do not depend on this field: every point would be the same")
        for sweep in sweeps
        if len(sweep.values) > 1 and not _matters(sweep.field, points)
    ]
    if problems:
        raise SpecError(problems)
    return points


def launches(points: Sequence[Point]) -> list[list[Point]]:
    """The points in groups with the same engines, which are started once for each group."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(engine_key(point.spec), []).append(point)
    return list(groups.values())


def engine_key(spec: RolloutSpec) -> str:
    """Equal for specs whose engines are started alike; of sampling it holds only what engines record."""
    role = spec.roles.rollout.model_dump(mode="json", exclude=set(live_names(spec.roles.rollout)))
    config = rollout_config(spec).model_dump(mode="json", exclude={"sampling"})
    environments = {name: one.model_dump(mode="json") for name, one in spec.roles.environments().items()}
    return value_text([role, config, environments, spec.sampling.truncates, spec.sampling.router_replay])


def measured_fields(spec: RolloutSpec) -> dict[str, Any]:
    """The fields that the rate of an engine depends on, by dotted path, besides the prompts."""
    number = {"workers", "min_workers", "max_workers"}
    sections = {
        "model": spec.model.model_dump(mode="json", include={"path", "dtype"}),
        "roles.rollout": spec.roles.rollout.model_dump(mode="json", exclude=number),
        "sampling": spec.sampling.model_dump(mode="json"),
    }
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}


def launch_spec(points: Sequence[Point]) -> RolloutSpec:
    """The spec with which the engines of a group of points are started: as many as the largest point uses."""
    return max(points, key=lambda point: point.workers).spec


def measured_spec(spec: RolloutSpec, batches: int, failures: Mapping[str, Any] | None = None) -> RolloutSpec:
    """The spec for the scheduler: a step per batch, no staleness, no replaced groups; by default no lost engine."""
    algorithm = AlgorithmConfig(name="reinforce", group_size=spec.group_size, dynamic_sampling=0)
    schedule = spec.schedule.model_copy(update={"max_staleness": 0, "steps": batches})
    tolerated = spec.failures.model_copy(update=failures or {"engine_restarts": 0, "max_attempts": 1})
    return spec.model_copy(update={"algorithm": algorithm, "schedule": schedule, "failures": tolerated})


def _point(load: Callable[[list[str]], RunSpec], settings: dict[str, Any], prompts: int | None) -> Point:
    try:
        spec = load([f"{field}={json.dumps(value)}" for field, value in settings.items()])
    except SpecError as error:
        raise SpecError([_swept(problem, settings) for problem in error.problems]) from None
    if spec.rollouts is None:
        raise UsageError("the spec has no rollouts to measure: it trains on offline data")
    rollouts = without_adapters(spec.rollouts)  # without a policy there are none to load
    if prompts is not None:
        schedule = rollouts.schedule.model_copy(update={"prompts_per_step": prompts})
        rollouts = rollouts.model_copy(update={"schedule": schedule})
    return Point(settings, rollouts)


def _swept(problem: Problem, settings: Mapping[str, Any]) -> Problem:
    """A problem with a swept field names the option that set it."""
    swept = problem.place.file == yaml_reader.OVERRIDE and problem.path in settings
    return replace(problem, place=Place(SWEEP)) if swept else problem


def _matters(field: str, points: Sequence[Point]) -> bool:
    """Whether rollouts differ between two points that differ in this field alone."""
    seen: dict[str, set[str]] = {}
    for point in points:
        others = {name: value for name, value in point.settings.items() if name != field}
        seen.setdefault(value_text(others), set()).add(_rollouts(point.spec))
    return any(len(found) > 1 for found in seen.values())


def _rollouts(spec: RolloutSpec) -> str:
    parts = [
        engine_key(spec),
        spec.roles.rollout.workers,
        spec.sampling.model_dump(mode="json"),
        spec.group_size,
        spec.schedule.prompts_per_step,
        [source.model_dump(mode="json") for source in spec.data.train_sources().values()],
        spec.seed,
    ]
    return value_text(parts)


def value_text(value: Any) -> str:
    """A value as YAML on one line."""
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)

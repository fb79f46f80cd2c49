"""A file of one run or of a chain of runs: stages in order, each with the models of those before it at hand.

A chain is a file with a section `stages`. What stands beside it is shared: every stage is that, with the stage's own
section laid over it. A model's path may be `stage:NAME`: the model that the earlier stage NAME ends with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator import spec_yaml
from orchestrator.algorithms import ALGORITHMS
from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS
from orchestrator.spec_any import AnySpec, missing, parse_any
from orchestrator.spec_errors import Path as FieldPath
from orchestrator.spec_errors import Place, Problem, Source, SpecError, format_path, nearest
from orchestrator.spec_offline import OfflineSpec

STAGE = "stage:"
_STAGES = "stages"
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a file."""

    stage: str
    """Name of the stage; empty where the file is a plain spec."""
    spec: AnySpec
    source: Source
    out: Path
    borrowed: frozenset[str] = frozenset()
    """Fields (dotted paths) that hold the path of a model which an earlier stage will write."""

    @property
    def model(self) -> Path:
        """Where the run's last checkpoint will hold its model."""
        return self.out / "checkpoints" / f"step-{self.spec.schedule.steps:06d}" / "model"

    @property
    def trains(self) -> str:
        """What kind of model that is: `policy` or `reward_model`."""
        return self.spec.row.trains if isinstance(self.spec, OfflineSpec) else "policy"

    def missing(self) -> list[Problem]:
        """What the run names and this machine does not have; what an earlier stage will write is not missed."""
        found = missing(self.spec, self.source)
        return [_prefixed(problem, self.stage) for problem in found if problem.path not in self.borrowed]


@dataclass(frozen=True)
class ChainDocument:
    """The file as it was written, to be sent elsewhere."""

    name: str
    data: dict[str, Any]

    def model_dump(self, *, mode: Literal["json"]) -> dict[str, Any]:
        """Its data, with the folder of the runs written out."""
        return self.data | {"output": {"folder": "runs"} | (self.data.get("output") or {})}


def read_document(path: str | Path, overrides: Sequence[str] = ()) -> spec_yaml.Document:
    """A file with its overrides. Raises SpecError."""
    return spec_yaml.override(spec_yaml.read_file(path), list(overrides))


def is_chain(document: spec_yaml.Document) -> bool:
    """Whether the file has stages."""
    return isinstance(document.data, dict) and _STAGES in document.data


def plan_runs(document: spec_yaml.Document, out: Path | None = None) -> tuple[PlannedRun, ...]:
    """Every run of a file, in order; a plain spec is one run.

    :param out: folder of the run, or of the chain (default: the spec's)
    Raises SpecError with one line for every problem found, in whatever stage.
    """
    if not is_chain(document):
        spec = parse_any(document)
        return (PlannedRun("", spec, document.source, out or spec.run_folder),)
    name, sections = _sections(document)
    folder = out or Path((document.data.get("output") or {}).get("folder") or "runs") / name
    runs: list[PlannedRun] = []
    problems: list[Problem] = []
    for stage in sections:
        try:
            runs.append(_plan_stage(document, name, stage, folder, runs, list(sections)))
        except SpecError as error:
            problems += [_prefixed(problem, stage) for problem in error.problems]
    if problems:
        raise SpecError(problems)
    return tuple(runs)


def to_send(document: spec_yaml.Document, runs: Sequence[PlannedRun]) -> AnySpec | ChainDocument:
    """What is sent where a file of these runs is to run elsewhere."""
    return ChainDocument(document.data["name"], document.data) if is_chain(document) else runs[0].spec


def _sections(document: spec_yaml.Document) -> tuple[str, Mapping[str, Any]]:
    """Name of the chain, and its stages' sections. Raises SpecError."""
    data, source = document.data, document.source
    name, stages = data.get("name"), data[_STAGES]
    problems: list[Problem] = []
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(source.problem("name", "is required: lowercase letters, digits and, between them, '-'"))
    if not isinstance(stages, dict) or not stages:
        problems.append(source.problem(_STAGES, "expected a section with a section for every stage, in order"))
        raise SpecError(problems)
    for stage, section in stages.items():
        path = f"{_STAGES}.{stage}"
        if not _NAME.fullmatch(stage):
            problems.append(source.problem(path, "may hold lowercase letters, digits and, between them, '_' and '-'"))
        if section is not None and not isinstance(section, dict):
            problems.append(source.problem(path, "expected a section"))
        elif section and "name" in section:
            problems.append(source.problem(f"{path}.name", "a stage is named by its key; remove it"))
    if problems:
        raise SpecError(problems)
    return str(name), {stage: section or {} for stage, section in stages.items()}


def _plan_stage(
    document: spec_yaml.Document, chain: str, stage: str, folder: Path, before: Sequence[PlannedRun], stages: list[str]
) -> PlannedRun:
    """One stage's run. Raises SpecError with paths as inside the stage."""
    shared = {key: value for key, value in document.data.items() if key != _STAGES}
    data = _laid_over(shared, document.data[_STAGES][stage] or {})
    data["name"] = f"{chain}-{stage}".replace("_", "-")
    algorithm = data.setdefault("algorithm", {})
    if isinstance(algorithm, dict) and stage in {*ALGORITHMS, *OFFLINE_ALGORITHMS}:
        algorithm.setdefault("name", stage)
    source = _stage_source(document.source, stage)
    borrowed = dict(_borrowed(data))
    problems: list[Problem] = []
    earlier = {run.stage: run for run in before}
    for path, name in borrowed.items():
        if name in earlier and path[-2:] == ("model", "path"):
            _set(data, path, str(earlier[name].model))
        elif name not in earlier and name in stages[: stages.index(stage)]:
            continue  # that stage has problems of its own, which are told
        else:
            problems.append(source.problem(format_path(path), _no_such(name, path, stages[: stages.index(stage)])))
    if problems:
        raise SpecError(problems)
    spec = parse_any(spec_yaml.Document(data, source))
    unfit = [source.problem(format_path(path), why) for path, why in _unfit(spec, borrowed, earlier)]
    if unfit:
        raise SpecError(unfit)
    return PlannedRun(stage, spec, source, folder / stage, frozenset(map(format_path, borrowed)))


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, section by section; a section of another `kind` replaces the one below as a whole."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        other_kind = isinstance(value, dict) and isinstance(under, dict) and "kind" in value
        if isinstance(value, dict) and isinstance(under, dict):
            merged[key] = value if other_kind and value["kind"] != under.get("kind") else _laid_over(under, value)
        else:
            merged[key] = value
    return {key: _laid_over(value, {}) if isinstance(value, dict) else value for key, value in merged.items()}


def _stage_source(source: Source, stage: str) -> Source:
    """Where the fields of a stage were written: in its own section, or in the shared part."""
    places: dict[FieldPath, Place] = {path: place for path, place in source.places.items() if path[0] != _STAGES}
    inside = (_STAGES, stage)
    own = {path[2:]: place for path, place in source.places.items() if path[:2] == inside and len(path) > 2}
    heading = source.places.get(inside)
    # A field that is nowhere is missed in the stage's section.
    return Source(source.file, {**places, **own}, heading)


def _borrowed(node: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """(path, stage) of every field that names a stage's model."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _borrowed(value, (*path, key))
    elif isinstance(node, str) and node.startswith(STAGE) and path[-1:] == ("path",):
        yield path, node.removeprefix(STAGE)


def _set(data: dict[str, Any], path: FieldPath, value: str) -> None:
    node: Any = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def _no_such(name: str, path: FieldPath, earlier: list[str]) -> str:
    if name in earlier:
        return f"{STAGE}{name} is a model; only a `model.path` can name it"
    hint = nearest(name, earlier) or f"stages before it: {', '.join(earlier) or 'none'}"
    return f"no earlier stage '{name[:60]}' ({hint})"


def _unfit(
    spec: AnySpec, borrowed: Mapping[FieldPath, str], earlier: Mapping[str, PlannedRun]
) -> Iterator[tuple[FieldPath, str]]:
    """Models of the wrong kind: a reward model where a language model is needed, or the other way round."""
    trains_reward_model = isinstance(spec, OfflineSpec) and spec.row.trains == "reward_model"
    for path, name in borrowed.items():
        is_reward_model = earlier[name].trains == "reward_model" if name in earlier else False
        if path[:2] == ("roles", "reward") and not is_reward_model:
            yield path, f"stage {name} trains a policy; the reward role needs a reward model"
        either = path[:2] in (("roles", "reward"), ("roles", "critic")) or trains_reward_model
        if is_reward_model and not either:
            yield path, f"stage {name} trains a reward model; here a language model is needed"


def _prefixed(problem: Problem, stage: str) -> Problem:
    if not stage:
        return problem
    path = f"{_STAGES}.{stage}.{problem.path}" if problem.path else f"{_STAGES}.{stage}"
    return Problem(problem.place, path, problem.message)

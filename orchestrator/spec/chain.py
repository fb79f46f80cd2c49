"""Chains of runs: stages in order; each can use the models and the samples of earlier stages.

A chain is a file with a section `stages`. The other sections are shared: every stage is their content, with the stage's
own section merged over it. A model's path may be `stage:NAME`, the final model of the earlier stage NAME; the path of
offline data may be so too, the stage's samples with their rewards. With `rounds: N` the stages run N times, and each
round starts from the last policy of the round before. A stage whose model is `stage:` and its own name starts from its
model of the round before; in the first round, from the shared model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.errors import nearest
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.adapters import trained_adapters
from troupe.orchestrator.spec.checks.machine import missing
from troupe.orchestrator.spec.checks.models import reads_tokens, scores_text
from troupe.orchestrator.spec.errors import Path as FieldPath
from troupe.orchestrator.spec.errors import Place, Problem, Source, SpecError, format_path
from troupe.workers.contract.adapter_config import as_peft, difference
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

STAGE = "stage:"
_STAGES, _ROUNDS = "stages", "rounds"
_MOST_ROUNDS = 100
RANKED, BEST = "ranked.jsonl", "best.jsonl"
"""Files with the samples of a stage in its folder: every group's answers with scores, and its best answer."""
Parse = Callable[[yaml_reader.Document], RunSpec]
_TRAIN = ("data", "train", "path")
_DATA = (_TRAIN, ("data", "eval", "path"))
"""Fields that samples of a stage can be read from."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a file."""

    stage: str
    """Name of the stage; empty if the file is a plain spec."""
    spec: RunSpec
    source: Source
    out: Path
    borrowed: frozenset[str] = frozenset()
    """Dotted paths of the fields that hold the path of an earlier stage's model or samples."""
    samples_of: tuple[Path, ...] = ()
    """Folders of the stages whose samples it trains on."""
    continues: Path | None = None
    """Folder of the stage's run in the round before, whose order of prompts or examples it continues, or None. Until
    that run has ended, `data.skip` is what it trains on; failed groups and those without signal are drawn besides."""

    @property
    def model(self) -> Path:
        """Folder of the model in the run's last checkpoint."""
        return self.out / "checkpoints" / f"step-{self.spec.schedule.steps:06d}" / "model"

    def field(self, path: str) -> str:
        """Dotted path in the file of a field of the run's spec."""
        return f"{_STAGES}.{self.stage}.{path}" if self.stage else path

    def missing(self) -> list[Problem]:
        """What the run names and this machine does not have, except for models that an earlier stage will write."""
        return [self.problem(path, message) for path, message in missing(self.spec) if path not in self.borrowed]

    def problem(self, path: str, message: str) -> Problem:
        """A problem with what a field names, by its dotted path in the run's spec, at its place in the file."""
        return _prefixed(self.source.problem(path, message, "unusable"), self.stage)


@dataclass(frozen=True)
class ChainDocument:
    """A chain's file as it was written, to be submitted elsewhere."""

    name: str
    data: dict[str, Any]

    def model_dump(self, *, mode: Literal["json"]) -> dict[str, Any]:
        """Its data, with the folder of runs filled in."""
        return self.data | {"output": {"folder": "runs"} | (self.data.get("output") or {})}

    def write(self, file: Path) -> None:
        """Write it as YAML, for its owner only."""
        write_atomic(file, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False), PRIVATE)


def results_folder(runs: Sequence[PlannedRun]) -> Path:
    """Folder of all runs of a file: of the run, or of the chain."""
    return Path(os.path.commonpath([run.out.parent for run in runs])) if runs[-1].stage else runs[-1].out


def is_chain(document: yaml_reader.Document) -> bool:
    return isinstance(document.data, dict) and _STAGES in document.data


def plan_chain(document: yaml_reader.Document, out: Path | None, parse: Parse) -> tuple[PlannedRun, ...]:
    """Every run of a chain, in order; `out` replaces its folder. Raises SpecError with a line for every problem."""
    name, sections = _sections(document)
    folder = out or Path((document.data.get("output") or {}).get("folder") or "runs") / name
    rounds = document.data.get(_ROUNDS, 1)
    if type(rounds) is not int or not 1 <= rounds <= _MOST_ROUNDS:
        why = f"expected a whole number from 1 to {_MOST_ROUNDS}, got {str(rounds)[:60]!r}"
        raise SpecError([document.source.problem(_ROUNDS, why, "out-of-range")])
    runs: list[PlannedRun] = []
    problems: dict[Problem, None] = dict.fromkeys(_lost_overrides(document, sections))
    for number in range(1, rounds + 1):
        own = f"round-{number:04d}" if rounds > 1 else ""
        begun = _next_round(document, runs) if number > 1 else document
        for stage in sections:
            try:
                names = f"{name}-{own}".rstrip("-"), stage
                runs.append(_plan_stage(begun, names, folder / own / stage, runs, list(sections), parse))
            except SpecError as error:
                problems |= dict.fromkeys(_prefixed(problem, stage) for problem in error.problems)
        if problems:
            raise SpecError([*problems])
    return tuple(runs)


def _next_round(document: yaml_reader.Document, before: Sequence[PlannedRun]) -> yaml_reader.Document:
    """The document of a further round: the shared model is the last policy of the rounds before. Raises SpecError if
    there is none."""
    last = next((run.stage for run in reversed(before) if run.spec.trains != "reward_model"), None)
    if last is None:
        raise SpecError(
            [document.source.problem(_ROUNDS, "no stage trains a policy that the next round could start from")]
        )
    shared = document.data.get("model")
    model = (shared if isinstance(shared, dict) else {}) | {"path": f"{STAGE}{last}"}
    return replace(document, data=document.data | {"model": model})


def to_send(document: yaml_reader.Document, runs: Sequence[PlannedRun]) -> RunSpec | ChainDocument:
    """What to submit so that the file runs elsewhere: the spec, or the whole chain."""
    return ChainDocument(document.data["name"], document.data) if is_chain(document) else runs[0].spec


def _sections(document: yaml_reader.Document) -> tuple[str, Mapping[str, Any]]:
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
        elif isinstance(section, dict) and "folder" in _section(section, "output"):
            why = "has no effect: stages are written to the chain's folder; set output.folder beside `stages`"
            problems.append(source.problem(f"{path}.output.folder", why))
    if problems:
        raise SpecError(problems)
    return str(name), {stage: section or {} for stage, section in stages.items()}


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of a stage as it was written; empty if it is none."""
    return data[key] if isinstance(data.get(key), dict) else {}


def _lost_overrides(document: yaml_reader.Document, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that `--set` gives the shared part, and that every stage replaces by its own."""
    shared = {key: value for key, value in document.data.items() if key != _STAGES}
    stages = {name: _merge_sections(shared, section) for name, section in sections.items()}
    places = document.source.places.items()
    given = [path for path, place in places if place.file == yaml_reader.OVERRIDE and path[0] != _STAGES]
    for path in given:
        around = any(other != path and other[: len(path)] == path for other in given)
        if not around and not any(_keeps(stage, shared, path) for stage in stages.values()):
            field = format_path(path)
            own = ", ".join(f"{_STAGES}.{name}.{field}" for name in stages)
            yield document.source.problem(field, f"has no effect: every stage has its own; set {own}")


def _keeps(stage: Any, shared: Any, path: FieldPath) -> bool:
    """Whether a stage has the value of the shared part at this path; of a section: one of its fields."""
    for part in path:
        try:
            stage, shared = stage[part], shared[part]
        except (KeyError, IndexError, TypeError):
            return False
    if isinstance(shared, dict) and isinstance(stage, dict):
        return not shared or any(_keeps(stage, shared, (key,)) for key in shared)
    return stage == shared


def _plan_stage(
    document: yaml_reader.Document,
    names: tuple[str, str],
    folder: Path,
    before: Sequence[PlannedRun],
    stages: list[str],
    parse: Parse,
) -> PlannedRun:
    """One stage's run, by the names of the chain and of the stage. Raises SpecError with paths as inside the stage."""
    chain, stage = names
    shared = {key: value for key, value in document.data.items() if key not in (_STAGES, _ROUNDS)}
    data = _merge_sections(shared, document.data[_STAGES][stage] or {})
    data["name"] = f"{chain}-{stage}".replace("_", "-")
    algorithm = data.setdefault("algorithm", {})
    if isinstance(algorithm, dict) and stage in {*ALGORITHMS, *OFFLINE_ALGORITHMS}:
        algorithm.setdefault("name", stage)
    source = _stage_source(document.source, stage)
    earlier = {run.stage: run for run in before}
    model = _section(data, "model")
    if _ROUNDS in document.data and stage not in earlier and model.get("path") == f"{STAGE}{stage}":
        data["model"] = {**model, "path": _section(shared, "model").get("path", model["path"])}
    borrowed = dict(_borrowed(data))
    # A further round draws what the rounds before have not drawn.
    before_it = earlier.get(stage) if _TRAIN not in borrowed else None
    if before_it is not None:
        schedule = before_it.spec.schedule
        data["data"]["skip"] = before_it.spec.data.skip + schedule.steps * schedule.rows_per_step
    problems: list[Problem] = []
    samples_of: list[Path] = []
    for path, name in borrowed.items():
        if path not in _DATA and name in earlier and earlier[name].spec.checkpoint.patience is not None:
            why = f"stage '{name}' may end before its last step (checkpoint.patience), so its model has no known folder"
            problems.append(source.problem(format_path(path), why))
        elif name in earlier and (path[-2:] == ("model", "path") or scores_text(format_path(path[:-1]))):
            _start_from(data, path, earlier[name])
        elif name in earlier and path in _DATA:
            samples_of.append(earlier[name].out)
            section = data["data"][path[1]]
            section["path"] = str(earlier[name].out / (BEST if section.get("answers") is None else RANKED))
            problems += [source.problem(format_path(path), why) for why in _without_samples(earlier[name], section)]
        elif name not in earlier and name in stages[: stages.index(stage)]:
            continue  # the problems of that stage itself are reported
        else:
            problems.append(source.problem(format_path(path), _no_such(name, path, stages[: stages.index(stage)])))
    if problems:
        raise SpecError(problems)
    spec = parse(yaml_reader.Document(data, source))
    unfit = [source.problem(format_path(path), why) for path, why in _unfit(spec, borrowed, earlier)]
    if unfit:
        raise SpecError(unfit)
    files = [*borrowed, *((*path[:-1], "adapter") for path in borrowed)]
    borrows, continues = frozenset(map(format_path, files)), None if before_it is None else before_it.out
    return PlannedRun(stage, spec, source, folder, borrows, tuple(samples_of), continues)


def _merge_sections(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` over `below`, section by section; a section of another `kind` replaces the one below whole."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        other_kind = isinstance(value, dict) and isinstance(under, dict) and "kind" in value
        if isinstance(value, dict) and isinstance(under, dict):
            merged[key] = value if other_kind and value["kind"] != under.get("kind") else _merge_sections(under, value)
        else:
            merged[key] = value
    return {key: _merge_sections(value, {}) if isinstance(value, dict) else value for key, value in merged.items()}


def _stage_source(source: Source, stage: str) -> Source:
    """Where the fields of a stage were written: in its own section, or in the shared part."""
    places: dict[FieldPath, Place] = {path: place for path, place in source.places.items() if path[0] != _STAGES}
    inside = (_STAGES, stage)
    own = {path[2:]: place for path, place in source.places.items() if path[:2] == inside and len(path) > 2}
    heading = source.places.get(inside)
    # A missing field is reported at the stage's section.
    return Source(source.file, {**places, **own}, heading)


def _borrowed(node: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """(path, stage) of every field that names a stage's model."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _borrowed(value, (*path, key))
    elif isinstance(node, str) and node.startswith(STAGE) and path[-1:] == ("path",):
        yield path, node.removeprefix(STAGE)


def _start_from(data: dict[str, Any], path: FieldPath, stage: PlannedRun) -> None:
    """Fill in a model's path: the stage's final model, or the model below its adapters, with them; the tokenizer is
    that model's. The reward role reads texts as the stage did."""
    section: Any = data
    for key in path[:-1]:
        section = section[key]
    below = stage.spec.model
    if scores_text(format_path(path[:-1])):
        section.setdefault("allow_special", below.allow_special)
    if not stage.spec.trains_adapters:
        section["path"] = str(stage.model)
        return
    section |= {"path": below.path, "adapter": str(stage.model)}
    if below.revision is not None:
        section["revision"] = below.revision
    if section.get("chat_template") is None and not reads_tokens(format_path(path[:-1])):
        section["chat_template"] = below.chat_template


def _without_samples(stage: PlannedRun, section: Mapping[str, Any]) -> Iterator[str]:
    """Why a section of data cannot read the samples of a stage."""
    if stage.spec.rollouts is None:
        yield f"stage {stage.stage} has no rollouts, and so no samples"
    elif stage.spec.rollouts.roles.environments():
        yield f"the samples of stage {stage.stage} are episodes; examples are made of single responses"
    elif not stage.spec.rollouts.output.trajectories:
        yield f"stage {stage.stage} keeps no samples; set stages.{stage.stage}.output.trajectories: true"
    if section.get("kind") != "jsonl":
        yield "samples of a stage are read with kind: jsonl"


def _no_such(name: str, path: FieldPath, earlier: list[str]) -> str:
    if name in earlier:
        return f"{STAGE}{name} is a model or samples; only `model.path` and the paths of offline data can name it"
    hint = nearest(name, earlier) or f"stages before it: {', '.join(earlier) or 'none'}"
    return f"no earlier stage '{name[:60]}' ({hint})"


def _unfit(
    spec: RunSpec, borrowed: Mapping[FieldPath, str], earlier: Mapping[str, PlannedRun]
) -> Iterator[tuple[FieldPath, str]]:
    """Models of the wrong kind: a reward model instead of a language model, or the reverse, or other adapters."""
    trains_reward_model = spec.trains == "reward_model"
    for path, name in borrowed.items():
        if path in _DATA or name not in earlier:
            continue
        is_reward_model = earlier[name].spec.trains == "reward_model"
        if path[:2] == ("roles", "reward") and not is_reward_model:
            yield path, f"stage {name} trains a policy; the reward role needs a reward model"
        either = path[:2] in (("roles", "reward"), ("roles", "critic")) or trains_reward_model
        if is_reward_model and not either:
            yield path, f"stage {name} trains a reward model; here a language model is needed"
    for section_path, section, lora in trained_adapters(spec):
        stage = next((name for path, name in borrowed.items() if format_path(path) == f"{section}.path"), "")
        before = earlier[stage].spec.roles.policy.lora if stage in earlier else None
        if before is not None:
            field, why = difference(as_peft(before), lora)
            if field:
                yield (*section_path.split("."), field), why


def _prefixed(problem: Problem, stage: str) -> Problem:
    if not stage:
        return problem
    path = f"{_STAGES}.{stage}.{problem.path}" if problem.path else f"{_STAGES}.{stage}"
    return replace(problem, path=path)

"""Resolves a spec's names on the hub to commits, and commits to files on this machine.

`pin` looks names up and changes the spec; the run's folder holds the pinned spec. `fetch` downloads, and gives the
spec that workers and readers see: folders and files instead of names.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from troupe.orchestrator.data.readers import file_format
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.hub import client
from troupe.orchestrator.hub.client import HubError, Repo, Snapshot
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.checks.machine import model_problems
from troupe.orchestrator.spec.checks.models import TOKENIZERS, model_folder
from troupe.orchestrator.spec.derived.paths import hub_data, hub_models, uses_hub, with_pins, with_sections
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.sources import HubFiles
from troupe.orchestrator.spec.yaml_reader import read_file
from troupe.orchestrator.telemetry.console import Console
from troupe.workers.contract.config_base import Frozen, ModelConfig
from troupe.workers.contract.units import MIB

SpecT = TypeVar("SpecT", bound=RunSpec)
SpecT_co = TypeVar("SpecT_co", bound=RunSpec, covariant=True)

_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Weights, configuration and tokenizer. No pickles: loading one can run any code."""
_CODE_FILES = ("*.py",)
"""Files for `trust_remote_code` only."""
_NOT_LOADED = ("*/*", "consolidated*.safetensors", "adapter_*")
"""Copies of the weights in other formats, and adapters beside them: neither belongs to the model."""
_SPLITS = ("train", "training", "test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev")
"""Words that name a split in a file's path."""


@dataclass(frozen=True)
class LocalFiles(Generic[SpecT_co]):
    """A spec whose models and data are on this machine, and what to download on other nodes for its workers."""

    spec: SpecT_co
    snapshots: tuple[Snapshot, ...] = ()


def pin_run(planned: PlannedRun, *, resume: bool) -> PlannedRun:
    """The run with every name on the hub pinned to a commit; a resumed run keeps the commits it is pinned to. Raises
    SpecError if a repository, a revision or a file of it does not exist or cannot be read."""
    spec = planned.spec
    if not uses_hub(spec):
        return planned
    stored = planned.out / RESOLVED_SPEC
    if resume and stored.is_file():
        spec = with_pins(spec, parse_spec(read_file(stored)))
    pinned, findings = pin(spec)
    if findings:
        raise SpecError([planned.problem(path, message) for path, message in findings])
    return replace(planned, spec=pinned)


def pin(spec: SpecT) -> tuple[SpecT, list[Finding]]:
    """The spec with commits instead of branches and tags, and what cannot be used; reads lists of files and configs."""
    sections: dict[str, Frozen] = {}
    findings: list[Finding] = []
    for section, model in hub_models(spec).items():
        try:
            pinned = model.model_copy(update={"revision": client.resolve(Repo("model", model.path), model.revision)})
            findings += _model_problems(spec, section, pinned)
            sections[section] = pinned
        except HubError as error:
            findings.append((f"{section}.{'path' if error.about == 'name' else 'revision'}", str(error)))
    for section, source in hub_data(spec).items():
        try:
            sections[section] = _pinned_data(source)
        except HubError as error:
            field = source.dataset_field if error.about == "name" else error.about
            findings.append((f"{section}.{field}", str(error)))
        except NoFiles as error:
            findings.append((f"{section}.{error.field}", str(error)))
    return with_sections(spec, sections), findings


def pin_configs(spec: SpecT) -> tuple[SpecT, list[Finding]]:
    """The spec with folders of at least `config.json` instead of hub names, to plan with; and what is not found."""
    sections: dict[str, Frozen] = {}
    findings: list[Finding] = []
    for section, model in hub_models(spec).items():
        repo = Repo("model", model.path)
        try:
            folder = client.config_folder(repo, client.resolve(repo, model.revision))
            sections[section] = model.model_copy(update={"path": str(folder), "revision": None})
        except HubError as error:
            findings.append((f"{section}.path", str(error)))
    return with_sections(spec, sections), findings


def describe(spec: RunSpec) -> list[str]:
    """One line for every repository of a pinned spec: its commit, and what a run will download."""
    lines = []
    for section, snapshot in _snapshots(spec).items():
        if client.cached(snapshot) is not None:
            state = "in the cache"
        else:
            sizes = client.list_files(snapshot.repo, snapshot.commit)
            total = sum(sizes[name] for name in snapshot.names(list(sizes)))
            state = f"{total / MIB:,.1f} MiB to download"
        lines.append(f"{section}: {snapshot.repo.name} at commit {snapshot.commit[:12]} ({state})")
    return lines


def fetch(spec: SpecT, console: Console) -> LocalFiles[SpecT]:
    """Downloads the models and data of a pinned spec that are not in the cache. Raises HubError."""
    sections: dict[str, Frozen] = {}
    snapshots = _snapshots(spec)
    models, data = hub_models(spec), hub_data(spec)
    for section, snapshot in snapshots.items():
        folder = client.cached(snapshot) or _download(snapshot, console)
        if section in models:
            if wrong := model_folder(folder):
                raise HubError(f"{section}.path: {wrong}")
            sections[section] = models[section].model_copy(update={"path": str(folder), "revision": None})
        else:
            files = tuple(str(folder / name) for name in data[section].files)
            sections[section] = data[section].model_copy(update={"files": files})
    return LocalFiles(with_sections(spec, sections), tuple(snapshots[section] for section in models))


def _download(snapshot: Snapshot, console: Console) -> Path:
    name = snapshot.repo.name
    console.message(f"downloading {name} at commit {snapshot.commit[:12]} to {snapshot.cache}")

    def show(done: int, total: int) -> None:
        console.phase(f"download {name}", done // MIB, total // MIB, unit="MiB")

    return client.download(snapshot, show)


def _snapshots(spec: RunSpec) -> dict[str, Snapshot]:
    """What a pinned spec needs from the hub, by section."""
    models = {
        section: Snapshot(Repo("model", model.path), str(model.revision), _patterns(model), _NOT_LOADED)
        for section, model in hub_models(spec).items()
    }
    data = {
        section: Snapshot(
            Repo("dataset", source.dataset_name), str(source.revision), tuple(map(glob.escape, source.files))
        )
        for section, source in hub_data(spec).items()
    }
    return models | data


def _repo(source: HubFiles) -> Repo:
    return Repo("dataset", source.dataset_name)


def _patterns(model: ModelConfig) -> tuple[str, ...]:
    return _MODEL_FILES + (_CODE_FILES if model.trust_remote_code else ())


def _model_problems(spec: RunSpec, section: str, model: ModelConfig) -> list[Finding]:
    """What a pinned model lacks, from the list of its files and its configuration."""
    repo, commit = Repo("model", model.path), str(model.revision)
    names = client.list_files(repo, commit)
    where = f"{model.path} at commit {commit[:12]}"
    if "config.json" not in names:
        return [(f"{section}.path", f"{where} is not a model for transformers: it has no config.json")]
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        why = "other formats can hold code and are not loaded; convert the model, or choose a revision that has them"
        return [(f"{section}.path", f"{where} has no *.safetensors: {why}")]
    if not any(name in names for name in TOKENIZERS):
        return [(f"{section}.path", f"{where} has no tokenizer ({', '.join(TOKENIZERS)})")]
    local = model.model_copy(update={"path": str(client.config_folder(repo, commit))})
    return model_problems(spec, {section: local})


class NoFiles(Exception):
    """No file of a dataset can be read; `field` is the one to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _pinned_data(source: HubFiles) -> HubFiles:
    repo = _repo(source)
    commit = client.resolve(repo, source.revision)
    names = choose_files(source, list(client.list_files(repo, commit)))
    return source.model_copy(update={"revision": commit, "files": tuple(names)})


def with_files(source: HubFiles, most: int | None = None) -> HubFiles:
    """A section at a commit with the paths of its files, or of the first `most`, which are downloaded. Raises NoFiles
    if the section selects no file; HubError if a file cannot be downloaded."""
    pinned = _pinned_data(source)
    names = pinned.files[:most]
    folder = client.download(Snapshot(_repo(source), str(pinned.revision), tuple(map(glob.escape, names))))
    return pinned.model_copy(update={"files": tuple(str(folder / name) for name in names)})


def choose_files(source: HubFiles, names: Sequence[str]) -> list[str]:
    """The files of a dataset that a section selects, sorted, of one format. Raises NoFiles (none, several subsets)."""
    dataset = source.dataset_name
    readable = [name for name in sorted(names) if file_format(name)]
    if not readable:
        raise NoFiles(
            source.dataset_field, f"{dataset} has no .parquet, .jsonl, .csv or .json files (.gz and .zst too)"
        )
    if source.files:
        found = [name for name in readable if any(fnmatch.fnmatch(name, pattern) for pattern in source.files)]
        if not found:
            raise NoFiles("files", f"no file of {dataset} matches; it has {_listed(readable)}")
        return found
    if source.subset is not None:
        readable = [name for name in readable if name.startswith(f"{source.subset}/")]
        if not readable:
            raise NoFiles("subset", f"{dataset} has no files in {source.subset}/; it has {_listed(sorted(names))}")
    found = _of_split(readable, source.split)
    if not found:
        raise NoFiles("split", f"no file of {dataset} has '{source.split}' in its path: {_listed(readable)}")
    preferred = min((file_format(name) for name in found), key=_PREFERENCE.index)
    found = [name for name in found if file_format(name) == preferred]
    folders = sorted({str(PurePosixPath(name).parent) for name in found})
    if source.subset is None and len(folders) > 1:
        raise NoFiles("subset", f"{dataset} has '{source.split}' in several folders: {_listed(folders)}; set subset")
    return found


_PREFERENCE = ("parquet", "jsonl", "csv", "json")


def _of_split(names: Sequence[str], split: str) -> list[str]:
    """Files with the split's word in their path; if no file names any split, all are `train`."""
    found = [name for name in names if split in _words(name)]
    if found or split != "train" or any(word in _words(name) for name in names for word in _SPLITS):
        return found
    return list(names)


def _words(name: str) -> list[str]:
    return re.split(r"[^A-Za-z]+", name.lower()) + re.split(r"[/.-]|\d{2,}", name)


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > most else shown

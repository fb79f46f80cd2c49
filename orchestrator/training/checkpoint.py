"""Atomic checkpoints: a checkpoint folder appears under its final name only when every byte of it is on disk.

`begin` creates a hidden folder and workers write their files into it. `commit` adds `state.json` and a manifest with
the size and SHA-256 of every file, syncs everything to disk and renames the folder to `step-000010`. `latest` returns
the newest checkpoint in which every file matches the manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.base import RunSpec

logger = logging.getLogger(__name__)

MODEL = "model"
"""Folder of a checkpoint that holds the policy as a Hugging Face model."""
AVERAGE = "model-average"
"""Folder of a checkpoint that holds the moving average of its weights, if the run keeps one."""
SAMPLES = "samples"
"""Folder of a checkpoint that holds finished samples of open groups. A run resumes without what is damaged there."""
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 1
_JSON_BYTES = 256 << 20
"""Largest manifest or state that is read."""
_REASON = 200
"""Characters of an error's message that are shown."""
_NAME = re.compile(r"step-(\d{6,})")
_SAVING = ".saving-"
_TRIAL = "trial"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"


@dataclass(frozen=True)
class TrainerLayout:
    """The settings on which the files of a training role depend."""

    zero_stage: int
    """The ZeRO stage in use, 0 to 3. (A single worker in float32 treats 1 and 2 as 0.)"""
    workers: int
    dtype: str
    """Data type of the weights."""
    expert_parallel_size: int = 1


class CheckpointError(OSError, TroupeError):
    """A checkpoint could not be written or found; `filename` is its path. Earlier checkpoints are unchanged."""


class CheckpointsTaken(CheckpointError):
    """Another run writes its checkpoints to the same place of an object store."""


class InvalidCheckpoint(Exception):
    """A folder is not a complete, unchanged checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    path: Path
    state: dict[str, Any]
    """The state passed to `commit`."""
    damaged: frozenset[str] = frozenset()
    """Files of the folder `samples` that are missing or changed, by path relative to the checkpoint."""

    @property
    def exported(self) -> bool:
        """Whether the checkpoint holds the model as a Hugging Face folder; trainers can also load it without one."""
        return (self.path / MODEL).is_dir()

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Turns errors of reading a malformed state within the block into a CheckpointError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"{STATE} is not the state of this kind of run ({type(error).__name__}: {_one_line(error)})"
            raise CheckpointError(errno.EINVAL, reason, str(self.path)) from error

    def trainers(self) -> dict[str, TrainerLayout]:
        """Layout of each training role's files, by role. Raises CheckpointError if the record is malformed."""
        with self.restoring():
            return {role: TrainerLayout(**layout) for role, layout in self.state.get("trainers", {}).items()}


class CheckpointStore:
    """The checkpoints of one run, in one folder to which every worker can write."""

    def __init__(self, directory: str | Path, keep: int) -> None:
        """Does not access the folder. Raises ValueError if `keep` is less than 1."""
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must be kept")
        self.directory = Path(directory)
        self.keep = keep
        self.protected: frozenset[int] = frozenset()
        """Steps whose checkpoints are not removed: the best ones."""
        self.in_use = 0
        """Step whose model plays against the policy and is not removed either, or 0."""

    def prepare(self) -> None:
        """Creates the folder and removes what interrupted saves left in it. Only the owning run may call this. Raises
        CheckpointError if the folder cannot be created or changed."""
        with _naming(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for entry in sorted(self.directory.iterdir()):
                if entry.name.startswith(_REPLACED):
                    original = self.directory / entry.name.removeprefix(_REPLACED)
                    if not original.exists():  # killed between the two renames of a replacement
                        os.replace(entry, original)
                        continue
                if entry.name.startswith((_SAVING, _REPLACED, _REMOVED)):
                    logger.info("removing %s, left by an interrupted save", entry)
                    shutil.rmtree(entry)

    def free_space(self) -> str:
        """Space that is left for checkpoints, and what the newest one takes, as text."""
        try:
            free = f"{shutil.disk_usage(self.directory).free >> 20} MiB are free in {self.directory}"
            for step in self.steps()[-1:]:
                files = self.folder(step).rglob("*")
                taken = sum(path.stat().st_size for path in files if path.is_file())
                free += f", and the checkpoint of step {step} takes {(taken >> 20) + 1}"
        except OSError as error:
            return f"{self.directory}: {error.strerror}"
        return free

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order; the checkpoints are not verified."""
        if not self.directory.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.directory.iterdir() if entry.is_dir()]
        return sorted(int(match.group(1)) for match in matches if match)

    def use(self, step: int) -> None:
        """Keeps the checkpoint of this step, and no longer that in use before."""
        self.in_use = step

    @property
    def kept(self) -> frozenset[int]:
        """Steps whose checkpoints stay, however many newer ones there are."""
        return self.protected | {self.in_use}

    def folder(self, step: int) -> Path:
        return self.directory / folder_name(step)

    def has_model(self, step: int) -> bool:
        """Whether the checkpoint of a step holds the model as a Hugging Face folder."""
        return (self.folder(step) / MODEL).is_dir()

    def begin_trial(self) -> Path:
        """Creates an empty hidden folder in which workers try to write. Raises CheckpointError."""
        return self._begin(_TRIAL)

    def begin(self, step: int) -> Path:
        """Creates an empty hidden folder for the workers' files. Raises CheckpointError if it cannot be created."""
        return self._begin(folder_name(step))

    def begin_again(self, step: int) -> Path:
        """Begins with links to the files of the step's checkpoint, without its samples: only these are new. Raises
        CheckpointError if it cannot be created, or the file system has no links."""
        before, path = self.folder(step), self._begin(folder_name(step))
        with _naming(path):
            try:
                for entry in before.iterdir():
                    if entry.is_dir() and entry.name != SAMPLES:
                        shutil.copytree(entry, path / entry.name, copy_function=os.link)
            except OSError:
                self.discard(path)
                raise
        return path

    def _begin(self, name: str) -> Path:
        path = self.directory / f"{_SAVING}{name}"
        with _naming(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            if path.exists():
                shutil.rmtree(path)
            path.mkdir()
        return path

    def commit(self, path: Path, state: dict[str, Any]) -> Checkpoint:
        """Publishes `path` (from `begin`) as its step's checkpoint, and removes the oldest ones beyond `keep`.
        Raises CheckpointError if it cannot be written; `path` is then removed."""
        name = path.name.removeprefix(_SAVING)
        step = step_of(name)
        if step is None or path.parent != self.directory:
            raise ValueError(f"{path} was not created by begin()")
        text = json.dumps(state, indent=1, allow_nan=False)
        final = self.directory / name
        try:
            with _naming(path):
                _write_synced(path / STATE, text)
                manifest = {"format": FORMAT, "step": step, "files": _describe_files(path, sync=True)}
                _write_synced(path / MANIFEST, json.dumps(manifest, indent=1))
                for folder in [path, *(entry for entry in path.rglob("*") if entry.is_dir())]:
                    _sync(folder)
                self._publish(path, final)
        except (CheckpointError, InvalidCheckpoint) as error:
            self.discard(path)
            if isinstance(error, InvalidCheckpoint):
                raise CheckpointError(errno.EINVAL, str(error), str(path)) from error
            raise
        self._prune(step)
        return Checkpoint(step, final, state)

    def adopt(self, path: Path) -> Checkpoint:
        """Publishes `path`, a copy of a checkpoint. Raises CheckpointError; InvalidCheckpoint (the copy is removed)."""
        final = self.directory / path.name.removeprefix(_SAVING)
        with _naming(path):
            _describe_files(path, sync=True)
            self._publish(path, final)
        try:
            return verify(final)
        except InvalidCheckpoint:
            self.discard(final)
            raise

    def discard(self, path: Path) -> None:
        """Removes a failed save to free its space; never raises."""
        shutil.rmtree(path, ignore_errors=True)

    def latest(self, before: int | None = None) -> Checkpoint | None:
        """The newest valid checkpoint (of an earlier step than `before`), or None; logs and skips invalid ones."""
        for step in reversed([step for step in self.steps() if before is None or step < before]):
            path = self.folder(step)
            try:
                return verify(path)
            except (InvalidCheckpoint, OSError) as error:
                logger.warning("skipping invalid checkpoint %s: %s", path, error)
        return None

    def _publish(self, path: Path, final: Path) -> None:
        """Renames `path` to `final`; `prepare` restores the old checkpoint after a crash between the two renames."""
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        if replaced.exists():
            shutil.rmtree(replaced)
        if final.exists():
            os.replace(final, replaced)
        os.replace(path, final)
        _sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Removes the oldest checkpoints before `newest` beyond the number to keep, except protected ones and, if
        `newest` has no model, the last one with a model. Later ones stay: damaged, or of an earlier run."""
        earlier = [step for step in self.steps() if step < newest]
        models = [] if self.has_model(newest) else [step for step in earlier if self.has_model(step)]
        for step in earlier[: max(0, len(earlier) - (self.keep - 1))]:
            if step in (*models[-1:], *self.kept):
                continue
            path = self.folder(step)
            hidden = path.with_name(f"{_REMOVED}{path.name}")
            try:
                os.replace(path, hidden)  # first: a partly removed checkpoint must not be found
                shutil.rmtree(hidden)
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", path, error)


def verify(path: Path) -> Checkpoint:
    """Verifies every file of a checkpoint against its manifest. Damaged samples do not make a checkpoint invalid: they
    are sampled again (`Checkpoint.damaged`). Raises InvalidCheckpoint if a file is missing, changed or not listed, or
    the manifest or the state cannot be read; OSError if a file cannot be read."""
    manifest = _read_json(path / MANIFEST)
    listed = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(listed, dict):
        raise InvalidCheckpoint(f"{MANIFEST} does not have format {FORMAT}")
    if manifest.get("step") != step_of(path.name):
        raise InvalidCheckpoint(f"{MANIFEST} belongs to step {manifest.get('step')}")
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in _files(path)}
    damaged: set[str] = set()

    def refuse(name: str, problem: str) -> None:
        if not name.startswith(f"{SAMPLES}/"):
            raise InvalidCheckpoint(problem)
        damaged.add(name)

    for name, entry in listed.items():
        expected = entry.get("bytes") if isinstance(entry, dict) else None
        if name not in sizes:
            refuse(name, f"{name} is missing")
        elif sizes[name] != expected:
            refuse(name, f"{name} has {sizes[name]} bytes; {MANIFEST} lists {expected}")
    if unlisted := sizes.keys() - listed.keys():
        raise InvalidCheckpoint(f"{min(unlisted)} is not listed in {MANIFEST}")
    for name, found in _describe_files(path, sync=False).items():
        if found["sha256"] != listed[name].get("sha256"):
            refuse(name, f"{name} has changed: its SHA-256 differs from {MANIFEST}")
    step = step_of(path.name)
    if STATE not in listed or step is None:
        raise InvalidCheckpoint(f"{STATE} is not listed in {MANIFEST}")
    return Checkpoint(step, path, _read_json(path / STATE), frozenset(damaged))


def verify_model(path: Path) -> None:
    """Verifies the model of a checkpoint against its manifest. Raises InvalidCheckpoint if a file is missing, changed
    or not listed; OSError if a file cannot be read."""
    listed = _read_json(path / MANIFEST).get("files", {})
    saved = {name: entry for name, entry in listed.items() if name.startswith(f"{MODEL}/")}
    found = {f"{MODEL}/{name}": entry for name, entry in _describe_files(path / MODEL, sync=False).items()}
    if changed := [name for name in saved | found if saved.get(name) != found.get(name)]:
        raise InvalidCheckpoint(f"{min(changed)} is not the file that {MANIFEST} lists")


def require_files(folder: Path, count: int) -> None:
    """Raises CheckpointError unless so many workers' files are in a folder: they may see another disk."""
    found = sum(entry.is_file() for entry in folder.iterdir()) if folder.is_dir() else 0
    if found < count:
        problem = f"{count - found} of {count} workers write to another disk: checkpoints need a folder of all nodes"
        raise CheckpointError(errno.ENOENT, problem, str(folder))


def trainer_layouts(spec: RunSpec) -> dict[str, TrainerLayout]:
    """Layout in which each training role of a spec writes its files, by role."""
    models = spec.models()
    layouts = {}
    for name, role in spec.roles.trainers().items():
        dtype = models.get(f"roles.{name}.model", spec.model).dtype
        stage = role.stage_for(role.workers, dtype == "float32")
        layouts[name] = TrainerLayout(stage, role.workers, dtype, role.expert_parallel_size)
    return layouts


def stage_problem(saved: TrainerLayout, now: TrainerLayout) -> str:
    """Why trainers cannot load another ZeRO stage's files, or empty: 1 and 2 are alike, float32 ones are converted."""
    both = {saved.zero_stage, now.zero_stage}
    if len(both) == 1 or both <= {1, 2} or (both <= {0, 1, 2} and now.dtype == "float32"):
        return ""
    words = (
        f"the checkpoint was written with ZeRO stage {saved.zero_stage} ({saved.workers} worker(s)), "
        f"whose optimizer states do not load into stage {now.zero_stage}"
    )
    remedy = "set zero_stage: 3" if saved.zero_stage == 3 else f"set zero_stage: {saved.zero_stage}"
    return f"{words}; {remedy}, or start another run from the model in the checkpoint"


def expert_problem(saved: TrainerLayout, now: TrainerLayout) -> str:
    """Why trainers cannot load files of experts that were divided in another way, or empty."""
    sizes = saved.expert_parallel_size, now.expert_parallel_size
    if sizes == (1, 1) or (sizes[0] == sizes[1] and saved.workers == now.workers):
        return ""
    return (
        f"the checkpoint was written with expert_parallel_size {sizes[0]} by {saved.workers} worker(s), and divided "
        "experts are not resharded; set both as they were, or start another run from the model in the checkpoint"
    )


async def load_checkpoint(found: Checkpoint, groups: Sequence[TrainerGroup[Any]], timeout_s: float) -> list[str]:
    """Loads each group's part of a checkpoint; returns a message for each group whose number of workers differs."""
    parts = [group.load(str(found.path / group.role), timeout_s=timeout_s) for group in groups]
    saved_by = await asyncio.gather(*parts)
    return [
        f"{group.role}: {ranks} worker(s) in the checkpoint, {group.ranks} now: optimizer states are resharded"
        for group, ranks in zip(groups, saved_by, strict=True)
        if ranks != group.ranks
    ]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON]


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has a folder of this name, or None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names a path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(error.errno, error.strerror, str(error.filename or path)) from error


def _files(path: Path) -> list[Path]:
    """Every file below a folder but its manifest. Raises InvalidCheckpoint for links, which may point outside."""
    found = []
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise InvalidCheckpoint(f"{entry.relative_to(path)} is not a regular file")
        if entry.is_file() and entry != path / MANIFEST:
            found.append(entry)
    return found


def _describe_files(path: Path, sync: bool) -> dict[str, dict[str, Any]]:
    """Size and hash of every file, by path relative to the folder; with `sync`, each file is also synced to disk."""

    def describe(file: Path) -> dict[str, Any]:
        with _naming(file), file.open("rb") as stream:
            if sync:
                os.fsync(stream.fileno())
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return {"bytes": stream.tell(), "sha256": digest}

    files = _files(path)
    with ThreadPoolExecutor(4) as pool:  # hashing and reading release the GIL
        described = list(pool.map(describe, files))
    return {str(file.relative_to(path)): entry for file, entry in zip(files, described, strict=True)}


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InvalidCheckpoint(f"{path.name} is not a regular file")  # a pipe would block
    try:
        with path.open("rb") as stream:
            text = stream.read(_JSON_BYTES + 1)
        if len(text) > _JSON_BYTES:
            raise InvalidCheckpoint(f"{path.name} is larger than {_JSON_BYTES >> 20} MiB")
        content = json.loads(text)
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path.name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{path.name} does not contain a JSON object")
    return content


def _write_synced(path: Path, text: str) -> None:
    with _naming(path), path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Syncs the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic checkpoints: a checkpoint is a folder that appears under its name only when every byte of it is on disk.

``begin`` makes a hidden folder, workers write their files into it, ``commit`` adds ``state.json`` and a manifest with
the size and SHA-256 of every file, syncs all of it and renames the folder to ``step-000010``. ``latest`` returns the
newest checkpoint of which every byte is as it was written.
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

from orchestrator.errors import TroupeError
from orchestrator.handles import Gang

logger = logging.getLogger(__name__)

MODEL = "model"
"""Folder of a checkpoint that holds the policy as a Hugging Face model."""
AVERAGE = "model-average"
"""The same of the moving average of its weights, where one is kept."""
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_SAVING = ".saving-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"


class CheckpointError(OSError, TroupeError):
    """A checkpoint could not be written or found; `filename` says where. Those that were there before still are."""


class Refused(Exception):
    """A folder is not a whole checkpoint, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    path: Path
    state: dict[str, Any]
    """What was given to `commit`."""


class CheckpointStore:
    """The checkpoints of one run, in one folder that every writer can reach."""

    def __init__(self, directory: str | Path, keep: int) -> None:
        """Nothing is touched yet.

        Raises:
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self.directory = Path(directory)
        self.keep = keep

    def prepare(self) -> None:
        """Make the folder and clear away what killed saves left in it. Only the run that owns the folder may do this.

        Raises:
            CheckpointError: the folder cannot be made or changed.
        """
        with _naming(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for entry in sorted(self.directory.iterdir()):
                if entry.name.startswith(_REPLACED):
                    original = self.directory / entry.name.removeprefix(_REPLACED)
                    if not original.exists():  # killed between the two renames of a replacement
                        os.replace(entry, original)
                        continue
                if entry.name.startswith((_SAVING, _REPLACED, _REMOVED)):
                    logger.info("removing %s, left by a save that did not finish", entry)
                    shutil.rmtree(entry)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, verified or not, in ascending order."""
        if not self.directory.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.directory.iterdir() if entry.is_dir()]
        return sorted(int(match.group(1)) for match in matches if match)

    def begin(self, step: int) -> Path:
        """Make an empty folder for workers to write their files to.

        Raises:
            CheckpointError: it cannot be made.
        """
        path = self.directory / f"{_SAVING}{_folder_name(step)}"
        with _naming(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            if path.exists():
                shutil.rmtree(path)
            path.mkdir()
        return path

    def commit(self, path: Path, state: dict[str, Any]) -> Checkpoint:
        """Make what is in `path` (from `begin`) the checkpoint of its step, and remove the oldest beyond `keep`.

        Raises:
            CheckpointError: it cannot be written (disk full, ...); `path` is then removed.
            ValueError: `state` is not JSON.
        """
        name = path.name.removeprefix(_SAVING)
        step = _step_of(name)
        if step is None or path.parent != self.directory:
            raise ValueError(f"{path} was not made by begin()")
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
        except (CheckpointError, Refused) as error:
            self.discard(path)
            if isinstance(error, Refused):
                raise CheckpointError(errno.EINVAL, str(error), str(path)) from error
            raise
        self._prune(step)
        return Checkpoint(step, final, state)

    def discard(self, path: Path) -> None:
        """Remove a save that failed, so that its space is free again; never raises."""
        shutil.rmtree(path, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as the manifest says; refused ones are logged and passed over."""
        for step in reversed(self.steps()):
            path = self.directory / _folder_name(step)
            try:
                return verify(path)
            except (Refused, OSError) as error:
                logger.warning("checkpoint %s is refused: %s", path, error)
        return None

    def _publish(self, path: Path, final: Path) -> None:
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        if replaced.exists():
            shutil.rmtree(replaced)
        if final.exists():
            os.replace(final, replaced)
        os.replace(path, final)
        _sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Remove checkpoints before `newest` beyond the number to keep. Later ones are left: they are of a run that was
        wound back, or damaged, and do not count."""
        earlier = [step for step in self.steps() if step < newest]
        for step in earlier[: max(0, len(earlier) - (self.keep - 1))]:
            doomed = self.directory / _folder_name(step)
            hidden = doomed.with_name(f"{_REMOVED}{doomed.name}")
            try:
                os.replace(doomed, hidden)  # first, so that nobody finds half a checkpoint
                shutil.rmtree(hidden)
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", doomed, error)


def verify(path: Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest.

    Raises:
        Refused: a file is missing, changed or not listed, or the manifest or the state cannot be read.
        OSError: a file cannot be read.
    """
    manifest = _read_json(path / MANIFEST)
    listed = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(listed, dict):
        raise Refused(f"{MANIFEST} is not of format {FORMAT}")
    if manifest.get("step") != _step_of(path.name):
        raise Refused(f"{MANIFEST} is of step {manifest.get('step')}")
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in _files(path)}
    for name, entry in listed.items():
        if name not in sizes:
            raise Refused(f"{name} is missing")
        if not isinstance(entry, dict) or sizes[name] != entry.get("bytes"):
            raise Refused(f"{name} has {sizes[name]} bytes, not what {MANIFEST} says")
    if unlisted := sizes.keys() - listed.keys():
        raise Refused(f"{min(unlisted)} is not in {MANIFEST}")
    for name, found in _describe_files(path, sync=False).items():
        if found["sha256"] != listed[name].get("sha256"):
            raise Refused(f"{name} is not what was written: its SHA-256 differs")
    step = _step_of(path.name)
    if STATE not in listed or step is None:
        raise Refused(f"{STATE} is not in {MANIFEST}")
    return Checkpoint(step, path, _read_json(path / STATE))


async def take_up(found: Checkpoint, gangs: Sequence[Gang], timeout_s: float) -> list[str]:
    """Every rank loads its role's part of a checkpoint; what to tell of roles that have another number of workers."""
    parts = [gang.broadcast("load", str(found.path / gang.role), timeout_s=timeout_s) for gang in gangs]
    saved_by = await asyncio.gather(*parts)
    return [
        f"{gang.role}: {ranks[0]} worker(s) in the checkpoint, {gang.ranks} now: states are laid out anew"
        for gang, ranks in zip(gangs, saved_by, strict=True)
        if ranks[0] != gang.ranks
    ]


def export_model(directory: Path, target: Path, step: int | None = None, model: str = MODEL) -> Path:
    """Copy the policy of a checkpoint (the newest valid one, where `step` is None) to the new folder `target`.

    `model`: MODEL for the trained weights, AVERAGE for their moving average.

    Raises:
        CheckpointError: there is no such valid checkpoint, it holds no model, or `target` exists or cannot be written.
    """
    found = CheckpointStore(directory, keep=1).latest() if step is None else _verified(directory / _folder_name(step))
    if found is None:
        raise CheckpointError(errno.ENOENT, "no valid checkpoint", str(directory))
    source = found.path / model
    if not source.is_dir():
        raise CheckpointError(errno.ENOENT, "the checkpoint holds no model of that kind", str(source))
    with _naming(target):
        shutil.copytree(source, target)
    return target


def _verified(path: Path) -> Checkpoint:
    try:
        return verify(path)
    except Refused as error:
        raise CheckpointError(errno.EINVAL, f"the checkpoint is refused: {error}", str(path)) from error


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names a path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(error.errno, error.strerror, str(error.filename or path)) from error


def _files(path: Path) -> list[Path]:
    """Every file below a folder but its manifest.

    Raises:
        Refused: something is neither a plain file nor a folder; a link could lead anywhere.
    """
    found = []
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise Refused(f"{entry.relative_to(path)} is not a plain file")
        if entry.is_file() and entry != path / MANIFEST:
            found.append(entry)
    return found


def _describe_files(path: Path, sync: bool) -> dict[str, dict[str, Any]]:
    """Size and hash of every file, by path relative to the folder; with `sync` each is forced to disk too."""

    def describe(file: Path) -> dict[str, Any]:
        with _naming(file), file.open("rb") as stream:
            if sync:
                os.fsync(stream.fileno())
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return {"bytes": stream.tell(), "sha256": digest}

    files = _files(path)
    with ThreadPoolExecutor(4) as pool:  # hashing and reading run outside the interpreter lock
        described = list(pool.map(describe, files))
    return {str(file.relative_to(path)): entry for file, entry in zip(files, described, strict=True)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Refused(f"{path.name} is missing") from None
    except ValueError as error:
        raise Refused(f"{path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise Refused(f"{path.name} is not an object")
    return content


def _write_synced(path: Path, text: str) -> None:
    with _naming(path), path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Force a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

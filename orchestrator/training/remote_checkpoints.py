"""Copies of a run's checkpoints in an object store, from which it resumes if its folder has none.

A checkpoint is uploaded in the background, its manifest last: without a manifest it is not found. `keep` holds there
too. The copy is fetched into the run's folder and verified there as any other checkpoint. The folder of the store
names the run that owns it, which every upload compares: two runs of one name would remove each other's checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.training.checkpoint import (
    MANIFEST,
    MODEL,
    SAMPLES,
    STATE,
    Checkpoint,
    CheckpointError,
    CheckpointsTaken,
    CheckpointStore,
    InvalidCheckpoint,
    folder_name,
    step_of,
)
from troupe.workers.contract.atomic_file import PRIVATE, replacing, write_atomic

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 3
_PAUSE_S = 2.0
"""Wait after a failed try, times its number. Arrow's clients repeat single requests before."""
_THREADS = 4
_COPY_BYTES = 8 << 20
_OWNER = "owner.json"
"""File of the store that names the run that writes there: its id, host and folder."""
_IDS = ".owner"
"""File of the run's own folder of checkpoints with the ids under which it wrote, the newest first."""


class RemoteCheckpoints:
    """The checkpoints of one run in an object store; only the run that claimed them writes there."""

    def __init__(self, url: str, name: str, keep: int) -> None:
        """Opens `s3://bucket/folder`, `gs://`, `abfs://`, `file:///`, pyarrow's options as query. Raises
        CheckpointError."""
        self.url = url
        self.keep = keep
        try:
            self._files, root = fs.FileSystem.from_uri(url)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CheckpointError(errno.EINVAL, f"checkpoint.path: {error}", url) from error
        self._root = PurePosixPath(root) / name
        self._id = uuid.uuid4().hex
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends another thread's upload after a part of a file, or its request; the process waits for that thread."""
        self._stopped.set()

    def steps(self) -> list[int]:
        """Steps whose upload is complete, in ascending order. Raises CheckpointError."""
        return sorted(step for step, complete in self._found().items() if complete)

    def claim(self, folder: Path, *, resumed: bool) -> None:
        """Makes this process the owner of the copies: earlier writers cannot write any more. `resumed`: the run
        resumes from one. Raises CheckpointsTaken if they are another run's; CheckpointError."""
        file = folder / _IDS
        try:
            ids: list[str] = json.loads(file.read_text()) if file.exists() else []
            # First: a process that dies between the two writes leaves an id that the next one knows.
            write_atomic(file, json.dumps([self._id, *ids[:1]]))
        except (OSError, ValueError) as error:
            raise CheckpointError(errno.EIO, f"{file.name}: {error}", str(folder)) from error
        owner = self._owner()
        if owner and owner.get("id") not in ids and not resumed and self.steps():
            raise self._taken(owner)
        self._write_owner(folder)

    def upload(self, checkpoint: Path, protected: Collection[int] = ()) -> None:
        """Copies a checkpoint and protected ones that are missing, and removes older ones beyond `keep`. A complete
        copy is not replaced for samples finished since: meanwhile there would be none. Raises CheckpointsTaken if
        another run has claimed the copies; CheckpointError if the store or checkpoint cannot be reached, or it
        was stopped."""
        owner = self._owner()
        if owner and owner.get("id") != self._id:
            raise self._taken(owner)
        there = self.steps()
        missing = [checkpoint.parent / folder_name(step) for step in protected if step not in there]
        for path in [*(path for path in missing if path != checkpoint and path.is_dir()), checkpoint]:
            if step_of(path.name) not in there or self._differs(path):
                self._copy(path)
        self._prune(checkpoint, protected)

    def _owner(self) -> dict[str, Any]:
        """The run that owns the copies, or empty if none does. Raises CheckpointError."""

        def read() -> bytes:
            try:
                with self._files.open_input_stream(str(self._root / _OWNER)) as stream:
                    return stream.read()
            except FileNotFoundError:
                return b"{}"

        try:
            return dict(json.loads(self._repeat(read)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                errno.EINVAL, f"checkpoint.path: {_OWNER} cannot be read: {error}", self.url
            ) from error

    def _write_owner(self, folder: Path) -> None:
        content = json.dumps({"id": self._id, "host": socket.gethostname(), "folder": str(folder.absolute())}).encode()

        def write() -> None:
            self._files.create_dir(str(self._root), recursive=True)
            with self._files.open_output_stream(str(self._root / _OWNER)) as sink:
                sink.write(content)

        self._repeat(write)

    def _taken(self, owner: dict[str, Any]) -> CheckpointsTaken:
        where = f"the checkpoints of '{self._root.name}' are written by another run"
        other = f"{owner.get('host')}:{owner.get('folder')}"
        return CheckpointsTaken(errno.EEXIST, f"checkpoint.path: {where} ({other}): set another name", self.url)

    def _differs(self, checkpoint: Path) -> bool:
        """Whether the complete copy of a checkpoint has other files than it, apart from samples and the state."""

        def read() -> bytes:
            with self._files.open_input_stream(str(self._root / checkpoint.name / MANIFEST)) as stream:
                return stream.read()

        return _lasting(self._repeat(read)) != _lasting((checkpoint / MANIFEST).read_bytes())

    def _copy(self, checkpoint: Path) -> None:
        """Copies a checkpoint, its manifest last."""
        target = self._root / checkpoint.name
        files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file != checkpoint / MANIFEST)
        # The step may have been saved before: that upload must not be found while it is replaced.
        self._repeat(lambda: self._delete(target))

        def send(file: Path) -> None:
            name = PurePosixPath(file.relative_to(checkpoint).as_posix())
            self._repeat(lambda: self._send(file, target / name))

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(send, files))
        if (spec := checkpoint.parent.parent / RESOLVED_SPEC).is_file():
            self._repeat(lambda: self._send(spec, self._root / RESOLVED_SPEC))
        send(checkpoint / MANIFEST)

    def fetch(self, store: CheckpointStore, after: int) -> Checkpoint | None:
        """Copies the newest valid checkpoint beyond `after` into a run's folder, or None. Raises CheckpointError."""
        for step in reversed([step for step in self.steps() if step > after]):
            if (found := self.fetch_step(store, step)) is not None:
                return found
        return None

    def fetch_spec(self, file: Path) -> None:
        """Copies the uploaded run's spec to a file, to compare a resumed run's with. Raises CheckpointError."""
        with (
            contextlib.suppress(InvalidCheckpoint),  # an earlier version has uploaded none
            replacing(file, PRIVATE) as unfinished,
        ):
            self._repeat(lambda: self._receive(self._root / RESOLVED_SPEC, unfinished))

    def fetch_step(self, store: CheckpointStore, step: int) -> Checkpoint | None:
        """Copies the checkpoint of a step into a run's folder; None if it is not valid. Raises CheckpointError."""
        path = store.begin(step)
        try:
            self._fetch(self._root / folder_name(step), path)
            return store.adopt(path)
        except InvalidCheckpoint as error:
            logger.warning("skipping invalid checkpoint %s in %s: %s", folder_name(step), self.url, error)
            return None
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, source: PurePosixPath, path: Path) -> None:
        self._repeat(lambda: self._receive(source / MANIFEST, path / MANIFEST))
        try:
            names = [PurePosixPath(name) for name in json.loads((path / MANIFEST).read_bytes())["files"]]
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
        if outside := [name for name in names if name.is_absolute() or ".." in name.parts]:
            raise InvalidCheckpoint(f"{MANIFEST} lists {outside[0]}")
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._repeat(lambda: self._receive(source / name, path / name)), names))

    def _found(self) -> dict[int, bool]:
        """Steps with any file in the store, and whether their upload is complete."""

        def find() -> dict[int, bool]:
            infos = self._files.get_file_info(fs.FileSelector(str(self._root), allow_not_found=True))
            steps = {info.base_name: step_of(info.base_name) for info in infos}
            found = {name: step for name, step in steps.items() if step is not None}
            manifests = self._files.get_file_info([str(self._root / name / MANIFEST) for name in found])
            complete = (info.type == fs.FileType.File for info in manifests)
            return dict(zip(found.values(), complete, strict=True))

        return self._repeat(find)

    def _prune(self, checkpoint: Path, protected: Collection[int]) -> None:
        """Removes the oldest checkpoints beyond `keep`, as in the run's folder, and what interrupted uploads left."""
        found, newest = self._found(), step_of(checkpoint.name) or 0
        earlier = sorted(step for step, complete in found.items() if complete and step < newest)
        surplus = earlier[: max(0, len(earlier) - (self.keep - 1))]
        models = [] if (checkpoint / MODEL).is_dir() or not surplus else self._with_model(earlier)
        surplus = [step for step in surplus if step not in protected and step not in models[-1:]]
        for step in [*surplus, *(step for step, complete in found.items() if not complete)]:
            try:
                self._delete(self._root / folder_name(step))
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s in %s: %s", folder_name(step), self.url, error)

    def _with_model(self, steps: Sequence[int]) -> list[int]:
        """The steps whose checkpoints hold the model as a Hugging Face folder."""
        folders = [str(self._root / folder_name(step) / MODEL) for step in steps]
        infos = self._repeat(lambda: self._files.get_file_info(folders))
        return [step for step, info in zip(steps, infos, strict=True) if info.type == fs.FileType.Directory]

    def _delete(self, target: PurePosixPath) -> None:
        if self._files.get_file_info(str(target / MANIFEST)).type == fs.FileType.File:
            self._files.delete_file(str(target / MANIFEST))
        if self._files.get_file_info(str(target)).type == fs.FileType.Directory:
            self._files.delete_dir(str(target))

    def _send(self, file: Path, to: PurePosixPath) -> None:
        self._files.create_dir(str(to.parent), recursive=True)
        with file.open("rb") as source, self._files.open_output_stream(str(to)) as sink:
            while part := source.read(_COPY_BYTES):
                self._require_going_on()
                sink.write(part)

    def _receive(self, source: PurePosixPath, to: Path) -> None:
        try:
            stream = self._files.open_input_stream(str(source))
        except FileNotFoundError:
            raise InvalidCheckpoint(f"{source.name} is missing") from None
        with stream, to.open("wb") as sink:
            shutil.copyfileobj(stream, sink, _COPY_BYTES)

    def _repeat(self, call: Callable[[], T]) -> T:
        """The result of a call that is repeated if it fails. Raises CheckpointError after the last try."""
        for number in itertools.count(1):
            self._require_going_on()
            try:
                return call()
            except (OSError, pa.ArrowException) as error:
                if number == _TRIES:
                    raise CheckpointError(errno.EIO, f"checkpoint.path: {error}", self.url) from error
                logger.info("%s: %s; trying again", self.url, error)
                self._stopped.wait(_PAUSE_S * number)
        raise RuntimeError("unreachable")

    def _require_going_on(self) -> None:
        if self._stopped.is_set():
            raise CheckpointError(errno.EINTR, "the upload was stopped", self.url)


def _lasting(manifest: bytes) -> dict[str, Any]:
    """The files of a manifest that do not change while the step is saved, or empty if it cannot be read."""
    try:
        files = dict(json.loads(manifest)["files"])
    except (ValueError, LookupError, TypeError):
        return {}
    return {name: facts for name, facts in files.items() if name != STATE and PurePosixPath(name).parts[0] != SAMPLES}

"""Requests of commands to an active run, through files in the run's folder.

While a run is active, its folder has a subfolder `control` that only the run's user can open. A command writes a
request there and waits for the answer, both JSON. No port is opened, and the folder may be on a shared file system.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.live.role_state import RoleState
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.spec.errors import SpecError
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

logger = logging.getLogger(__name__)

FOLDER = "control"
_OWNER = "run.json"
_POLL_S = 0.5
_LARGEST = 64 * 1024
"""Longest request, in bytes."""


class Request(BaseModel):
    """A request to a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    changes: dict[str, Any]
    """New values of spec fields by dotted path; empty: only report the state."""


class Answer(BaseModel):
    """A run's answer to a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str = ""
    """Why nothing was changed; empty: the request succeeded."""
    roles: tuple[RoleState, ...] = ()


class _Owner(BaseModel):
    """The process that answers requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int


class ControlServer:
    """Answers the requests to one run.

    A background task polls the folder for request files, passes their changes to the scaler and writes the answers. It
    waits for nothing but the poll interval and its own file operations; :meth:`close` cancels it.
    """

    def __init__(self, run_folder: Path, scaler: WorkerScaler) -> None:
        self._folder = run_folder / FOLDER
        self._scaler = scaler
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start answering. Files of earlier runs in the folder are deleted."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        _write(self._folder / _OWNER, _Owner(host=socket.gethostname(), pid=os.getpid()))
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Stop answering and delete the folder."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _serve(self) -> None:
        while True:
            try:
                for file in await asyncio.to_thread(lambda: sorted(self._folder.glob("request-*.json"))):
                    answer = self._answer(file)
                    file.unlink(missing_ok=True)
                    _write(file.with_name(file.name.replace("request", "answer", 1)), answer)
            except OSError as error:
                logger.warning("%s: cannot answer a request: %s", self._folder, error)
            await asyncio.sleep(_POLL_S)

    def _answer(self, file: Path) -> Answer:
        try:
            with file.open("rb") as stream:
                text = stream.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                raise UsageError(f"the request exceeds {_LARGEST} bytes")
            request = Request.model_validate_json(text)
            if request.changes:
                self._scaler.change(request.changes)
        except (SpecError, UsageError) as error:
            return Answer(error=str(error))
        except (OSError, ValidationError) as error:
            return Answer(error=f"cannot read the request: {type(error).__name__}")
        return Answer(roles=self._scaler.states())


def ask(run_folder: Path, changes: dict[str, Any], timeout_s: float) -> tuple[RoleState, ...]:
    """Ask a run to change its spec.

    Args:
        run_folder: Folder of the run.
        changes: New values by dotted path; empty: only report the state.
        timeout_s: Longest wait for the answer, in seconds.

    Returns:
        The state of every role that scales.

    Raises:
        UsageError: The folder has no active run, or the run refuses the change.
        TroupeError: The run does not answer in time, or ends meanwhile.
    """
    folder = run_folder / FOLDER
    _require_run(run_folder)
    name = f"{uuid.uuid4().hex}.json"
    request, answer = folder / f"request-{name}", folder / f"answer-{name}"
    try:
        _write(request, Request(changes=changes))
        _wait(lambda: answer.exists() or not folder.exists(), timeout_s)
        text = answer.read_text()
        answer.unlink(missing_ok=True)
    except TimeoutError:
        request.unlink(missing_ok=True)
        raise TroupeError(f"{run_folder}: the run did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise TroupeError(
            f"{run_folder}: the run has ended, or its folder is not accessible: {error.strerror}"
        ) from error
    try:
        found = Answer.model_validate_json(text)
    except ValidationError:
        raise TroupeError(f"{run_folder}: the run's answer cannot be read: is it another version of Troupe?") from None
    if found.error:
        raise UsageError(found.error)
    return found.roles


def _require_run(run_folder: Path) -> None:
    """Raise UsageError if the folder has no active run, as far as this machine can tell."""
    if not run_folder.is_dir():
        raise UsageError(f"{run_folder}: no such folder; RUN is a run folder, as in runs/NAME")
    try:
        owner = _Owner.model_validate_json((run_folder / FOLDER / _OWNER).read_bytes())
    except (OSError, ValidationError):
        raise UsageError(f"{run_folder}: no active run, or it has not started all its workers yet") from None
    if owner.host == socket.gethostname() and not psutil.pid_exists(owner.pid):
        raise UsageError(f"{run_folder}: its run (process {owner.pid}) has ended")


def _write(path: Path, content: BaseModel) -> None:
    """Write a file atomically, for its owner only."""
    write_atomic(path, json.dumps(content.model_dump(mode="json")), PRIVATE)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S / 5)

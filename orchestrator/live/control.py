"""Requests of commands to change an active run: JSON in the mailbox `control`, which exists while the run is active."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from troupe.orchestrator import mailbox
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.live.role_state import RoleState
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.mailbox import Mailbox
from troupe.orchestrator.spec.errors import SpecError
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

logger = logging.getLogger(__name__)

FOLDER = "control"
_OWNER = "run.json"
_POLL_S = 0.5


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
        self._mailbox = Mailbox(run_folder / FOLDER)
        self._scaler = scaler
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start answering. Files of earlier runs in the folder are deleted."""
        folder = self._mailbox.folder
        shutil.rmtree(folder, ignore_errors=True)
        self._mailbox.open()
        write_atomic(folder / _OWNER, _Owner(host=socket.gethostname(), pid=os.getpid()).model_dump_json(), PRIVATE)
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Stop answering and delete the folder."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await asyncio.to_thread(shutil.rmtree, self._mailbox.folder, ignore_errors=True)

    async def _serve(self) -> None:
        while True:
            try:
                for request in await asyncio.to_thread(lambda: list(self._mailbox.take())):
                    self._mailbox.answer(request, self._answer(request).model_dump_json())
            except OSError as error:
                logger.warning("%s: cannot answer a request: %s", self._mailbox.folder, error)
            await asyncio.sleep(_POLL_S)

    def _answer(self, request: mailbox.Request) -> Answer:
        try:
            if request.too_long:
                raise UsageError(f"the request exceeds {mailbox.LONGEST} bytes")
            asked = Request.model_validate_json(request.content or b"")
            if asked.changes:
                self._scaler.change(asked.changes)
        except (SpecError, UsageError) as error:
            return Answer(error=str(error))
        except ValidationError as error:
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
    _require_run(run_folder)
    try:
        text = Mailbox(run_folder / FOLDER).ask(Request(changes=changes).model_dump_json(), timeout_s)
    except OSError as error:
        raise TroupeError(
            f"{run_folder}: the run has ended, or its folder is not accessible: {error.strerror}"
        ) from error
    if text is None:
        raise TroupeError(f"{run_folder}: the run did not answer within {timeout_s:g} s")
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

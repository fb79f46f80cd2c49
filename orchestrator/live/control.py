"""Requests of commands to change an active run: JSON in the mailbox `control`, which exists while the run is active."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.live.lock import LockHolder
from troupe.orchestrator.live.mailbox import LONGEST, Mailbox, PostedRequest, require_folder
from troupe.orchestrator.live.scaling import RoleState, WorkerScaler
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.training.parts import RunPart

logger = logging.getLogger(__name__)

FOLDER = "control"
_POLL_S = 0.5


class ChangeRequest(BaseModel):
    """A request to a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    changes: dict[str, Any]
    """New values of spec fields by dotted path; if empty, only report the state."""


class ChangeAnswer(BaseModel):
    """A run's answer to a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str = ""
    """Why nothing was changed; empty if the request succeeded."""
    roles: tuple[RoleState, ...] = ()


class ControlServer(RunPart):
    """Answers the requests to one run (`troupe scale`, `troupe apply`): a task polls the folder, passes changes to
    the scaler and writes answers. It waits for its interval and files only; :meth:`close` cancels it."""

    def __init__(self, run_folder: Path, scaler: WorkerScaler) -> None:
        self._mailbox = Mailbox(run_folder / FOLDER)
        self._scaler = scaler
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start answering. Files of earlier runs in the folder are deleted."""
        self._mailbox.open()
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
                while (request := await asyncio.to_thread(next, self._mailbox.take(), None)) is not None:
                    await asyncio.to_thread(self._mailbox.answer, request, self._answer(request).model_dump_json())
            except OSError as error:
                logger.warning("%s: cannot answer a request: %s", self._mailbox.folder, error)
            await asyncio.sleep(_POLL_S)

    def _answer(self, request: PostedRequest) -> ChangeAnswer:
        try:
            if request.too_long:
                raise UsageError(f"the request exceeds {LONGEST} bytes")
            asked = ChangeRequest.model_validate_json(request.content or b"")
            if asked.changes:
                self._scaler.change(asked.changes)
        except (SpecError, UsageError) as error:
            return ChangeAnswer(error=str(error))
        except ValidationError as error:
            return ChangeAnswer(error=f"cannot read the request: {type(error).__name__}")
        return ChangeAnswer(roles=self._scaler.states())


def ask(run_folder: Path, changes: dict[str, Any], timeout_s: float) -> tuple[RoleState, ...]:
    """Ask a run to change fields (dotted path to value); returns the state of every role that scales. Raises
    UsageError without an active run or if it refuses; TroupeError without an answer in time."""
    _require_run(run_folder)
    try:
        request = ChangeRequest(changes=changes).model_dump_json()
        text = Mailbox(run_folder / FOLDER).ask(request.encode(), timeout_s)
    except TimeoutError:
        raise TroupeError(f"{run_folder}: the run did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise TroupeError(
            f"{run_folder}: the run has ended, or its folder is not accessible: {error.strerror}"
        ) from error
    try:
        found = ChangeAnswer.model_validate_json(text)
    except ValidationError:
        raise TroupeError(f"{run_folder}: the run's answer cannot be read: is it another version of Troupe?") from None
    if found.error:
        raise UsageError(found.error)
    return found.roles


def _require_run(run_folder: Path) -> None:
    """Raise UsageError if the folder has no active run, as far as this machine can tell."""
    require_folder(run_folder)
    holder = LockHolder.of(run_folder)
    if holder is None or not (run_folder / FOLDER).is_dir():
        raise UsageError(f"{run_folder}: no active run, or it has not started all its workers yet")
    if not holder.is_active:
        raise UsageError(f"{run_folder}: its run has ended: {holder.absence}")
    if holder.waits:
        raise UsageError(f"{run_folder}: its run has ended, and {holder.waits}")

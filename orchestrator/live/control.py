"""How a command reaches a run that goes on: through files in the run's own folder.

The folder `control` of a run is there while it goes on, for the run's own user only. A command puts a request there
and waits for its answer, both JSON. No port is opened for it, and the folder may be on a file system shared between
machines.
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

from orchestrator.errors import TroupeError, UsageError
from orchestrator.scaling import Crew, RoleState
from orchestrator.spec_errors import SpecError

log = logging.getLogger(__name__)

FOLDER = "control"
_OWNER = "run.json"
_POLL_S = 0.5
_LONGEST = 64 * 1024
"""Bytes of a request."""


class Request(BaseModel):
    """What is asked of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    changes: dict[str, Any]
    """Fields of the spec, and their new values; none: only say how it stands."""


class Answer(BaseModel):
    """What the run says to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str = ""
    """Why nothing was changed."""
    roles: tuple[RoleState, ...] = ()


class _Owner(BaseModel):
    """The process that answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int


class ControlServer:
    """Answers the requests to one run."""

    def __init__(self, run_folder: Path, crew: Crew) -> None:
        self._folder = run_folder / FOLDER
        self._crew = crew
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Answer from now on; what earlier runs left is cleared away."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        _write(self._folder / _OWNER, _Owner(host=socket.gethostname(), pid=os.getpid()))
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Answer no more."""
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
                log.warning("%s: a request could not be answered: %s", self._folder, error)
            await asyncio.sleep(_POLL_S)

    def _answer(self, file: Path) -> Answer:
        try:
            if file.stat().st_size > _LONGEST:
                raise UsageError(f"a request has at most {_LONGEST} bytes")
            request = Request.model_validate_json(file.read_bytes())
            if request.changes:
                self._crew.change(request.changes)
        except (SpecError, UsageError) as error:
            return Answer(error=str(error))
        except (OSError, ValidationError) as error:
            return Answer(error=f"the request cannot be read: {type(error).__name__}")
        return Answer(roles=self._crew.states())


def ask(run_folder: Path, changes: dict[str, Any], timeout_s: float) -> tuple[RoleState, ...]:
    """Have a run change its spec; returns how its roles stand.

    Raises UsageError where it refuses, TroupeError where no run answers within the bound.
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
        raise TroupeError(f"{run_folder}: the run has not answered within {timeout_s:g} s") from None
    except OSError as error:
        raise TroupeError(f"{run_folder}: the run has ended, or its folder cannot be used: {error.strerror}") from error
    found = Answer.model_validate_json(text)
    if found.error:
        raise UsageError(found.error)
    return found.roles


def _require_run(run_folder: Path) -> None:
    """Raises UsageError where no run goes on in this folder, as far as this machine can tell."""
    if not run_folder.is_dir():
        raise UsageError(f"{run_folder}: no such folder; RUN is the folder of a run, as in runs/NAME")
    try:
        owner = _Owner.model_validate_json((run_folder / FOLDER / _OWNER).read_bytes())
    except (OSError, ValidationError):
        raise UsageError(f"{run_folder}: no run goes on there, or it has not started all its workers yet") from None
    if owner.host == socket.gethostname() and not psutil.pid_exists(owner.pid):
        raise UsageError(f"{run_folder}: its run (process {owner.pid}) is gone")


def _write(path: Path, content: BaseModel) -> None:
    """Write a file that appears whole."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(content.model_dump(mode="json")))
    scratch.rename(path)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S / 5)

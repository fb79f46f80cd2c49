"""Ray jobs through Ray's own job client: `troupe submit`, `jobs`, `status`, `logs` and `stop`.

Where a run is, is read from the log of its job: the job server has only what was printed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from troupe.orchestrator.cluster.ray_environment import JOB_SERVER_VARIABLES
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError, first_line
from troupe.orchestrator.live.run_state import Name
from troupe.orchestrator.platforms.job_files import copy_folder
from troupe.orchestrator.signals import STOPPED
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import ChainDocument
from troupe.orchestrator.spec.derived.paths import absolute_paths

_CREDENTIALS = re.compile(r"://[^/\s@]+@")
"""A user name or a token in a URL."""
_STATUS_TIMEOUT_S = 60.0
_AGENT_TIMEOUT_S = 60.0
_POLL_S = 0.5
_SAVE_TIMEOUT_S = 600.0
"""Longest a stopped job may take to save before Ray kills it."""
SENT = ".troupe-"
"""Beginning of the name of a job's copy of the spec."""
_SIGNALLED = 128
"""A shell's exit code for a process that a signal has killed is this and the signal's number."""
_NAME = "troupe"
"""Metadata key that holds the name of the run."""

_STEP = re.compile(r"step \d+/\d+  ")
_ID = re.compile(r"[\w.-]+")
_STATUS_CODE = re.compile(r"Request failed with status code \d+: ")
_CLASS_NAME = re.compile(r"\w+(Error|Exception): ")
_CHATTY = ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging")
"""Loggers of Ray that report every upload and the end of a log."""

Echo = Callable[[str], Any]


@dataclass(frozen=True)
class Submission:
    """What to submit with a spec. Raises UsageError if a path does not exist, the requirements hold a password, or the
    id has characters that Ray's log files cannot have in their names."""

    job: str | None = None
    """Submission id, or None if Ray generates one."""
    working_dir: Path | None = None
    """Folder to upload, or None for the spec alone."""
    requirements: Path | None = None
    """Requirements file for every worker's environment, or None for the cluster's installed packages."""

    def __post_init__(self) -> None:
        if self.job is not None and not _ID.fullmatch(self.job):
            raise UsageError(f"--submission-id: expected letters, digits, '.', '_' and '-', got {self.job!r}")
        if self.working_dir is not None and not self.working_dir.is_dir():
            raise UsageError(f"--working-dir: no such folder: {self.working_dir}")
        if self.requirements is not None:
            _check_requirements(self.requirements)


@dataclass(frozen=True)
class JobState:
    """State of a job, as the job server reports it."""

    job: str
    name: str
    """Name of the run; empty if the job was not submitted by Troupe."""
    status: str
    """As the job server names it."""
    state: Name
    """The state of the run."""
    seconds: float
    """Duration so far, or in total once the job has ended."""
    message: str

    def last_step(self, log: str) -> str:
        """The line of the last step in the job's log, without the time left if it runs no more; before a step, the last
        line of a job that runs, which says what it waits for."""
        lines = log.splitlines()
        ended = self.status in ("STOPPED", "SUCCEEDED", "FAILED")
        line = next((line for line in reversed(lines) if _STEP.match(line)), "" if ended else (lines or [""])[-1])
        return line.rpartition("  ")[0] if ended and line.endswith(" left") else line

    def line(self) -> str:
        named = f"{self.job} ({self.name})" if self.name else self.job
        return f"{named}: {self.status}, {self.seconds:.0f} s" + (f": {self.message}" if self.message else "")


class JobServer:
    """Client of a cluster's job server. Every method raises TroupeError if it does not answer or the job is unknown."""

    def __init__(self, address: str) -> None:
        from ray.job_submission import JobSubmissionClient

        for name in _CHATTY:
            logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
        self._address = address
        with self._reported(), _hidden(JOB_SERVER_VARIABLES):  # Ray's client prefers them to its argument
            self._client = JobSubmissionClient(address, headers=token_header())

    def submit(self, spec: RunSpec | ChainDocument, submission: Submission, note: Echo) -> str:
        """Submit the spec with absolute paths; returns the submission id. What is sent is a copy; `note` is called
        with what of the working directory is left out. Raises UsageError if there is a job with this id."""
        if same := [state for state in self.jobs() if state.job == submission.job]:
            raise UsageError(
                f"--submission-id: there is a job with this id ({same[0].line()}); use another id, or none: a run "
                "resumes in its folder, whatever the id of its job"
            )
        with tempfile.TemporaryDirectory(prefix="troupe-job-") as scratch, self._reported():
            if submission.working_dir is not None:
                for line in copy_folder(submission.working_dir, Path(scratch)).notes():
                    note(line)
            runtime_env: dict[str, Any] = {"working_dir": scratch, "env_vars": job_environment()}
            if submission.requirements is not None:
                runtime_env["pip"] = str(submission.requirements)
            file = Path(scratch) / f"{SENT}{spec.name}.yaml"
            file.write_text(yaml.safe_dump(absolute_paths(spec.model_dump(mode="json")), sort_keys=False))
            return submit_when_ready(
                self._client,
                entrypoint=entrypoint(file.name),
                submission_id=submission.job,
                runtime_env=runtime_env,
                metadata={_NAME: spec.name},
            )

    def jobs(self) -> list[JobState]:
        with self._reported():
            found = [job for job in self._client.list_jobs() if job.submission_id]
        return [_state(job) for job in sorted(found, key=lambda job: -(job.start_time or 0))]

    def state(self, job: str) -> JobState:
        with self._reported():
            return _state(self._client.get_job_info(job))

    def logs(self, job: str) -> str:
        with self._reported():
            return self._client.get_job_logs(job)

    def follow(self, job: str, echo: Echo) -> bool:
        """Pass the job's output to `echo` until the job ends; returns whether it succeeded. Raises StopRequested if
        the user interrupts, which the job does not notice."""
        from ray.job_submission import JobStatus

        self.state(job)  # the log of an unknown job is a failed handshake
        try:
            with self._reported():
                asyncio.run(_tail(self._client, job, echo))
                status = _final_status(self._client, job)
        except KeyboardInterrupt:
            raise StopRequested(f"{job} is no longer followed, and continues; `troupe stop` stops it") from None
        echo(f"{job}: {status.value}")
        return status == JobStatus.SUCCEEDED

    def stop(self, job: str, timeout_s: float) -> JobState:
        """Stop the job, which saves and exits, and wait. Raises TroupeError if it does not end in time."""
        with self._reported():
            self._client.stop_job(job)
            deadline = time.monotonic() + timeout_s
            while not self._client.get_job_status(job).is_terminal():
                if time.monotonic() > deadline:
                    raise TroupeError(f"{job} has not ended within {timeout_s:g} s; it may still be saving")
                time.sleep(_POLL_S)
        return self.state(job)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn the client's errors into one-line TroupeErrors that name the address."""
        from aiohttp import ClientError  # Ray's client follows a log with it
        from ray.exceptions import RayError

        try:
            yield
        except (OSError, RuntimeError, ValueError, RayError, ClientError) as error:
            if isinstance(error, TroupeError):
                raise
            raise TroupeError(f"--address {self._address}: {said(error)}") from error


@contextmanager
def _hidden(names: Iterable[str]) -> Iterator[None]:
    """Removes these environment variables for the block."""
    found = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(found)


def said(error: BaseException) -> str:
    """The line of an error of the client that says something: of a traceback of the server, the last one."""
    lines = [line for line in str(error).splitlines() if line.strip(" .")]
    traceback = any("Traceback (most recent call last)" in line for line in lines)
    text = _CLASS_NAME.sub("", lines[-1], count=1) if traceback else first_line(error)
    return _STATUS_CODE.sub("", text)


def _check_requirements(file: Path) -> None:
    """Raise UsageError for a file that cannot be read, or with a password: the job server keeps and shows its lines."""
    if not file.is_file():
        raise UsageError(f"--requirements: no such file: {file}")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--requirements: {file} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if _CREDENTIALS.search(line) and "://git@" not in line:
            raise UsageError(
                f"--requirements: {file}:{number}: a URL with a password, which the cluster would show to everyone; "
                "configure pip's index on the nodes instead"
            )


_STATES: Mapping[str, Name] = {
    "PENDING": "not started",
    "RUNNING": "running",
    "STOPPED": "stopped",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
}


def _run_state(status: str, code: int | None) -> Name:
    """The state of the run of a job; `code`: its exit code, or -N for signal N."""
    if status == "FAILED" and code is not None:
        return "stopped" if code == STOPPED else "died" if code < 0 or code > _SIGNALLED else "failed"
    return _STATES.get(status, "unknown")


def _state(job: Any) -> JobState:
    started, ended = (job.start_time or 0) / 1000, (job.end_time or 0) / 1000
    seconds = (ended or time.time()) - started if started else 0.0
    message, _, log = ("" if job.status.value == "RUNNING" else job.message or "").strip().partition("\n")
    if log and (event := message.partition(", last available logs")[0]) != message:
        message = f"{event}: {log.splitlines()[-1].strip()}"
    status, name = job.status.value, (job.metadata or {}).get(_NAME, "")
    return JobState(job.submission_id, name, status, _run_state(status, job.driver_exit_code), seconds, message)


def submit_when_ready(client: Any, **job: Any) -> str:
    """Submit, and retry for a while: a head that has just started answers before its agent accepts jobs."""
    deadline = time.monotonic() + _AGENT_TIMEOUT_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def entrypoint(spec_file: str) -> str:
    """The job's command line, which restarts; with this interpreter, or the one on the cluster's PATH."""
    python = f'"$(command -v {shlex.quote(sys.executable)} || command -v python || echo python3)"'
    return f"{python} -m troupe run {shlex.quote(spec_file)} --resume --supervise"


def job_environment() -> dict[str, str]:
    """Environment variables of the job, none from this process: time to save if it is stopped (Ray gives three
    seconds), and the source tree, if Troupe runs from one, on the path."""
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": f"{_SAVE_TIMEOUT_S:g}"}
    root = Path(__file__).resolve().parents[2]
    return environment | ({"PYTHONPATH": str(root)} if (root / "pyproject.toml").is_file() else {})


def token_header() -> dict[str, str]:
    """HTTP header with Ray's token, or empty. The job client does not read the token, and setting RAY_AUTH_MODE,
    which Ray reads once, would make this process and its clusters differ."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text().strip() if file.is_file() else "")
    return {"Authorization": f"Bearer {token}"} if token else {}


async def _tail(client: Any, job: str, echo: Echo) -> None:
    async for lines in client.tail_job_logs(job):
        echo(lines.rstrip("\n"))


def _final_status(client: Any, job: str) -> Any:
    """The job's status once it is terminal; the log may end a moment before the job does."""
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while True:
        status = client.get_job_status(job)
        if status.is_terminal() or time.monotonic() > deadline:
            return status
        time.sleep(_POLL_S)

"""A spec as a Ray job, by Ray's own job client: `troupe submit`, `jobs`, `status`, `logs`, `stop`."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from orchestrator.errors import TroupeError
from orchestrator.spec_paths import absolute_paths

_EXCLUDES = [".git", ".venv", "venv", "__pycache__", "runs", ".cache", "*.safetensors", "*.pt"]
"""Never sent along with a working directory."""
_STATUS_TIMEOUT_S = 60.0
_AGENT_TIMEOUT_S = 60.0
_POLL_S = 0.5
_SAVE_TIMEOUT_S = 600.0
"""Longest a job that was asked to stop may take to save; then Ray kills it."""
_NAME = "troupe"
"""Where a job's metadata name the run."""

Echo = Callable[[str], Any]


class Submittable(Protocol):
    """A spec, or a chain of them."""

    @property
    def name(self) -> str:
        """Name of the run."""
        ...

    def model_dump(self, *, mode: Literal["json"]) -> dict[str, Any]:
        """Its data, as YAML can hold them."""
        ...


@dataclass(frozen=True)
class Submission:
    """How a spec is sent."""

    job: str | None = None
    """Its submission id; None: Ray makes one."""
    working_dir: Path | None = None
    """Folder to send along; None: the spec alone."""
    requirements: Path | None = None
    """A requirements file that every worker's environment is made from; None: what the cluster has."""


@dataclass(frozen=True)
class JobState:
    """What the job server says of a job."""

    job: str
    name: str
    """Of the run; empty: it was not submitted by Troupe."""
    status: str
    seconds: float
    """Since its start, or until its end."""
    message: str

    def line(self) -> str:
        """In one line."""
        named = f"{self.job} ({self.name})" if self.name else self.job
        return f"{named}: {self.status}, {self.seconds:.0f} s" + (f": {self.message}" if self.message else "")


class JobServer:
    """The job server of a cluster. Every method raises TroupeError where it does not answer or knows no such job."""

    def __init__(self, address: str) -> None:
        """`address`: its URL."""
        from ray.job_submission import JobSubmissionClient

        if not address.startswith(("http://", "https://")):
            raise TroupeError(f"--address {address}: expected the job server's URL, as in http://HOST:8265")
        self._address = address
        with self._told():
            self._client = JobSubmissionClient(address, headers=token_header())

    def submit(self, spec: Submittable, submission: Submission) -> str:
        """Send the spec; returns the submission id.

        The job gets the spec with every relative path made absolute, because its working directory is another one.
        """
        with tempfile.TemporaryDirectory(prefix="troupe-job-") as scratch, self._told():
            folder = submission.working_dir or Path(scratch)
            file = folder / f".troupe-{spec.name}.yaml"
            runtime_env: dict[str, Any] = {"working_dir": str(folder), "excludes": _EXCLUDES}
            runtime_env["env_vars"] = job_environment()
            if submission.requirements is not None:
                runtime_env["pip"] = str(submission.requirements)
            try:
                file.write_text(yaml.safe_dump(absolute_paths(spec.model_dump(mode="json")), sort_keys=False))
                return _submit_when_ready(
                    self._client,
                    entrypoint=entrypoint(file.name),
                    submission_id=submission.job,
                    runtime_env=runtime_env,
                    metadata={_NAME: spec.name},
                )
            finally:
                file.unlink(missing_ok=True)

    def jobs(self) -> list[JobState]:
        """Every job, the newest first."""
        with self._told():
            found = [job for job in self._client.list_jobs() if job.submission_id]
        return [_state(job) for job in sorted(found, key=lambda job: -(job.start_time or 0))]

    def state(self, job: str) -> JobState:
        """One job."""
        with self._told():
            return _state(self._client.get_job_info(job))

    def logs(self, job: str) -> str:
        """What the job has printed so far."""
        with self._told():
            return self._client.get_job_logs(job)

    def follow(self, job: str, echo: Echo) -> bool:
        """Show what the job prints until it ends; whether it succeeded."""
        from ray.job_submission import JobStatus

        with self._told():
            asyncio.run(_tail(self._client, job, echo))
            status = _final_status(self._client, job)
        echo(f"{job}: {status.value}")
        return status == JobStatus.SUCCEEDED

    def stop(self, job: str, timeout_s: float) -> JobState:
        """Have the run save and leave, and wait for its end. Raises TroupeError where it has not ended in time."""
        with self._told():
            self._client.stop_job(job)
            deadline = time.monotonic() + timeout_s
            while not self._client.get_job_status(job).is_terminal():
                if time.monotonic() > deadline:
                    raise TroupeError(f"{job} has not ended within {timeout_s:g} s")
                time.sleep(_POLL_S)
        return self.state(job)

    @contextmanager
    def _told(self) -> Iterator[None]:
        from ray.exceptions import RayError

        try:
            yield
        except (OSError, RuntimeError, ValueError, RayError) as error:
            if isinstance(error, TroupeError):
                raise
            raise TroupeError(f"--address {self._address}: {_first_line(error)}") from error


def _state(job: Any) -> JobState:
    started, ended = (job.start_time or 0) / 1000, (job.end_time or 0) / 1000
    seconds = (ended or time.time()) - started if started else 0.0
    message = "" if job.status.value == "RUNNING" else _first_line(RuntimeError(job.message or ""))
    return JobState(job.submission_id, (job.metadata or {}).get(_NAME, ""), job.status.value, seconds, message)


def _submit_when_ready(client: Any, **job: Any) -> str:
    """Submit; a head that has just started answers before its agent can take a job, so wait for that, with a bound."""
    deadline = time.monotonic() + _AGENT_TIMEOUT_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def entrypoint(spec_file: str) -> str:
    """The job's command line: this interpreter where the cluster has it too, else the one on the cluster's PATH."""
    python = f'"$(command -v {shlex.quote(sys.executable)} || command -v python || echo python3)"'
    return f"{python} -m orchestrator.cli run {shlex.quote(spec_file)} --resume"


def job_environment() -> dict[str, str]:
    """Time to save when the job is stopped (Ray allows three seconds), and, where Troupe runs from its source tree and
    not from an installed package, that tree. Nothing of this process's own environment travels."""
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": f"{_SAVE_TIMEOUT_S:g}"}
    root = Path(__file__).resolve().parent.parent
    return environment | ({"PYTHONPATH": str(root)} if (root / "pyproject.toml").is_file() else {})


def token_header() -> dict[str, str]:
    """Ray's token, where there is one, as the job server wants it: unlike `ray.init`, the job client has to be told.

    Told by a header and not by RAY_AUTH_MODE, which Ray reads once at its import: a later change of it splits a process
    from the clusters it starts.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text().strip() if file.is_file() else "")
    return {"Authorization": f"Bearer {token}"} if token else {}


async def _tail(client: Any, job: str, echo: Echo) -> None:
    async for lines in client.tail_job_logs(job):
        echo(lines.rstrip("\n"))


def _final_status(client: Any, job: str) -> Any:
    """The job's status; the log may end a moment before the job does."""
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while True:
        status = client.get_job_status(job)
        if status.is_terminal() or time.monotonic() > deadline:
            return status
        time.sleep(_POLL_S)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")

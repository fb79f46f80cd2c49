"""`troupe submit`: a spec becomes a Ray job, by Ray's own job client."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from orchestrator.errors import TroupeError
from orchestrator.spec_chain import STAGE

_EXCLUDES = [".git", ".venv", "venv", "__pycache__", "runs", ".cache", "*.safetensors", "*.pt"]
"""Never sent along with a working directory."""
_STATUS_TIMEOUT_S = 60.0
_AGENT_TIMEOUT_S = 60.0
_POLL_S = 0.5

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


def submit_spec(spec: Submittable, address: str, *, follow: bool, working_dir: Path | None, echo: Echo) -> int:
    """Submit the spec; returns the exit code (with `follow`: 0 only if the job succeeded).

    The job gets the spec with every relative path made absolute, because its working directory is another one.
    Raises TroupeError when the job server does not answer.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    if not address.startswith(("http://", "https://")):
        raise TroupeError(f"--address {address}: expected the job server's URL, as in http://HOST:8265")
    with tempfile.TemporaryDirectory(prefix="troupe-job-") as scratch:
        folder = working_dir or Path(scratch)
        file = folder / f".troupe-{spec.name}.yaml"
        try:
            file.write_text(yaml.safe_dump(absolute_paths(spec.model_dump(mode="json")), sort_keys=False))
            client = JobSubmissionClient(address, headers=token_header())
            job = _submit_when_ready(
                client,
                entrypoint=entrypoint(file.name),
                runtime_env={"working_dir": str(folder), "excludes": _EXCLUDES, "env_vars": job_environment()},
                metadata={"troupe": spec.name},
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise TroupeError(f"--address {address}: {_first_line(error)}") from error
        finally:
            file.unlink(missing_ok=True)
    echo(f"submitted {job}")
    if not follow:
        echo(f"follow it with: ray job logs --address {address} --follow {job}")
        return 0
    try:
        asyncio.run(_tail(client, job, echo))
        status = _final_status(client, job)
    except (OSError, RuntimeError) as error:
        raise TroupeError(f"--address {address}: lost sight of {job}: {_first_line(error)}") from error
    echo(f"{job}: {status.value}")
    return 0 if status == JobStatus.SUCCEEDED else 1


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
    """Where Troupe runs from its source tree and not from an installed package, the job must find that tree."""
    root = Path(__file__).resolve().parent.parent
    return {"PYTHONPATH": str(root)} if (root / "pyproject.toml").is_file() else {}


def absolute_paths(document: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """A dumped spec whose paths no longer depend on the current directory: relative ones start at `root` (default: the
    current directory)."""
    start = Path.cwd() if root is None else root

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            # What stands under `args` is the user's own and never a path of ours.
            return {k: v if k == "args" else walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key) for v in value]
        if key not in _PATH_FIELDS or not isinstance(value, str) or value.startswith(STAGE):
            return value
        return str(start / value)

    return walk(document, "")


def path_fields(node: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """(dotted field, path) of every path that a dumped spec names."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key != "args":
                yield from path_fields(value, f"{field}.{key}" if field else key)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from path_fields(value, f"{field}.{index}")
    elif isinstance(node, str) and field.rpartition(".")[2] in _PATH_FIELDS and not node.startswith(STAGE):
        yield field, node


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
    return next(iter(str(error).splitlines()), type(error).__name__)


_PATH_FIELDS = frozenset({"path", "folder"})
"""Names of the spec's fields that hold a path."""

"""Virtual environments of built-in environments, and the tasks that environments have themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import UsageError, nearest
from troupe.workers.isolation.interpreters import (
    NoInterpreter,
    installed_folder,
    installed_mark,
    interpreter_of,
    lock_of,
    locked,
)
from troupe.workers.isolation.probe import ProbeFailed, ask

_ROWS = "troupe.workers.agents.environments.base:rows"
_TIMEOUT_S = 600.0
_ROWS_OF_A_SPEC = 1000
_SHOWN_S = 10.0
"""Seconds between two lines of progress."""


def install(name: str, further: Sequence[str], say: Callable[[str], None]) -> Path:
    """Install the packages of an environment's lock, and `further` requirements, which the lock constrains; folders
    by their place (editable). Returns the interpreter. Raises UsageError without a lock, or if pip fails."""
    if name not in locked():
        hint = nearest(name, locked()) or f"there are {', '.join(locked())}"
        raise UsageError(f"no lock of packages for the environment '{name[:60]}' ({hint})")
    folder, mark, lock = installed_folder(name), installed_mark(name), lock_of(name)
    python, started = folder / "bin" / "python", time.monotonic()
    done = json.loads(mark.read_text()) if mark.is_file() else {"with": [], "seconds": 0.0, "mib": 0}
    missing = sorted({f"-e{Path(one).resolve()}" if _is_folder(one) else one for one in further} - set(done["with"]))
    if mark.is_file() and not missing:
        say(f"{name} is installed: {_summary(done)}; its interpreter is {python}")
        return python
    if not mark.is_file():
        packages = sum(1 for line in lock.read_text().splitlines() if line.strip())
        say(f"installing {packages} packages of {name} in {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], say)
        _run([*_installer(python), "-r", str(lock)], say)
    if missing:
        mark.unlink(missing_ok=True)
        _run([*_installer(python), "-c", str(lock), *missing], say)
    mib = sum(file.lstat().st_size for file in folder.rglob("*")) >> 20
    seconds = round(done["seconds"] + time.monotonic() - started, 1)
    done = {"with": sorted({*done["with"], *missing}), "seconds": seconds, "mib": mib}
    mark.write_text(json.dumps(done))
    say(f"installed {name}: {_summary(done)}; its interpreter is {python}")
    return python


def _is_folder(requirement: str) -> bool:
    """Whether pip reads a requirement as a folder, and not as the name of a package."""
    return Path(requirement).is_dir() and (os.sep in requirement or requirement.startswith("."))


def _installer(python: Path) -> list[str]:
    """The command that installs requirements: uv's, if it is there, which takes seconds instead of minutes."""
    uv = shutil.which("uv")
    # -I: pip would treat packages on PYTHONPATH as installed.
    return (
        [str(python), "-I", "-m", "pip", "install"] if uv is None else [uv, "pip", "install", "--python", str(python)]
    )


def own_rows(name: str, args: Mapping[str, Any], limit: int, python: str | None = None) -> list[dict[str, Any]]:
    """The rows of data that an environment has itself. Raises UsageError if it has none, or does not load."""
    try:
        request = {"name": name, "args": dict(args), "limit": limit}
        found = ask(_ROWS, request, _TIMEOUT_S, interpreter_of(name, python))
    except (NoInterpreter, ProbeFailed) as error:
        raised = error.raised if isinstance(error, ProbeFailed) else ""
        raise UsageError(raised or f"{name}: {error}") from None
    if not found:
        raise UsageError(f"{name}: it has no tasks with these arguments")
    return found


def write_rows(name: str, args: Mapping[str, Any], spec: Path, *, force: bool) -> Path:
    """Write the tasks of an environment beside a spec, as `NAME-rows.jsonl`. Raises UsageError as `own_rows` does."""
    path = spec.with_name(f"{spec.stem}-rows.jsonl")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it, --data names the rows")
    path.write_text("".join(json.dumps(row) + "\n" for row in own_rows(name, args, _ROWS_OF_A_SPEC)))
    return path


def _summary(done: Mapping[str, Any]) -> str:
    further = f", with {', '.join(done['with'])}" if done["with"] else ""
    return f"{done['mib']} MiB in {done['seconds']:g} s{further}"


def _run(command: Sequence[str], say: Callable[[str], None]) -> None:
    """Run a program of the installation. Raises UsageError with its last lines if it fails."""
    lines, shown = list[str](), time.monotonic()
    pipe, environment = subprocess.PIPE, os.environ.copy()
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines = [*lines[-20:], line.strip()]
            if time.monotonic() - shown > _SHOWN_S:
                shown = time.monotonic()
                say(f"  {line.strip()[:100]}")
    if process.returncode:
        raise UsageError(f"{' '.join(command[:4])}: exit code {process.returncode}: {' | '.join(lines[-5:])}")

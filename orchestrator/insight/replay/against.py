"""Repeats steps with the code of another checkout, and finds where its weights first differ from this code's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

import troupe
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.insight.replay.repeat import Repeated, different_metrics
from troupe.workers.contract.config import first_problem

_COMMAND = Path("orchestrator") / "commands" / "replay.py"
_TAIL_LINES = 5


class StepThere(BaseModel):
    """A step as another checkout repeated it. Fields that this code does not know are ignored."""

    step: int
    equal: bool
    weights: dict[str, dict[str, str]]
    """Digest of each whole parameter in order, by role."""
    updates: list[dict[str, float]]


class ReplayThere(BaseModel):
    """A replay with the code of another checkout."""

    root: str
    """Folder of the code that ran."""
    steps: list[StepThere]


@dataclass(frozen=True)
class Difference:
    """The first step after which two versions of the code have different weights."""

    step: int
    names: dict[str, list[str]]
    """Parameters that differ, in the order of the model, by role."""
    parameters: dict[str, int]
    """Parameters of each role."""
    metrics: list[str]
    """Metrics of the updates that differ, as text."""


def require_checkout(path: Path) -> Path:
    """The folder of another checkout. Raises UsageError."""
    root = path.resolve()
    if not (root / "orchestrator" / "cli.py").is_file():
        raise UsageError(f"--against {path}: no checkout of Troupe: it has no orchestrator/cli.py")
    if not (root / _COMMAND).is_file():
        raise UsageError(f"--against {path}: this version has no `troupe replay` ({_COMMAND}): use a later one")
    return root


def replay_there(root: Path, run: Path, step: int, folder: Path, timeout_s: float) -> ReplayThere:
    """Repeats a run up to a step with the code of a checkout, in a separate process.

    Args:
        root: The checkout.
        run: Folder of the run.
        step: The step.
        folder: Where its result is written.
        timeout_s: Bound on the replay.

    Raises:
        TroupeError: It failed, or took too long.
    """
    result = folder / "result.json"
    module = "troupe" if (root / "troupe").is_dir() else "orchestrator.cli"  # versions before the package `troupe`
    command = [sys.executable, "-m", module, "replay", str(run), "--step", str(step), "--result", str(result)]
    log = folder / "log"
    with log.open("wb") as output:
        try:
            # Ray adds the current folder to the path of its workers: it must be the code's folder.
            done = subprocess.run(
                command,
                cwd=root,
                env=os.environ | {"PYTHONPATH": _python_path(root)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TroupeError(f"the replay with {root} took longer than {timeout_s:g} s") from None
    if not result.is_file():
        tail = "\n  ".join(log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        raise TroupeError(f"the replay with {root} failed (exit code {done.returncode}):\n  {tail}")
    try:
        there = ReplayThere.model_validate_json(result.read_bytes())
    except ValidationError as error:
        raise TroupeError(f"the replay with {root} wrote something else: {first_problem(error)}") from None
    if Path(there.root).resolve() != root:
        raise TroupeError(f"the replay was to use {root}, and used {there.root}")
    return there


def write_result(file: Path, steps: Sequence[Repeated]) -> None:
    """Writes what `replay_there` reads."""
    there = [{**asdict(step), "equal": step.equal} for step in steps]
    file.write_text(json.dumps({"root": str(own_root()), "steps": there}))


def own_root() -> Path:
    """Folder of the code that runs."""
    return Path(troupe.__file__).resolve().parent.parent


def difference(here: Repeated, there: StepThere) -> Difference | None:
    """How a step differs between this code and another, or None if the weights are equal."""
    names = {
        role: [name for name, digest in digests.items() if there.weights.get(role, {}).get(name) != digest]
        for role, digests in here.weights.items()
    }
    if not any(names.values()):
        return None
    sizes = {role: len(digests) for role, digests in here.weights.items()}
    metrics = different_metrics(there.updates, here.updates, "there")
    return Difference(here.step, {role: found for role, found in names.items() if found}, sizes, metrics)


def _python_path(root: Path) -> str:
    """The checkout first; then what this process sees, so that the user's functions are found."""
    entries = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()]
    return os.pathsep.join([str(root), *(entry for entry in entries if Path(entry).resolve() != own_root())])

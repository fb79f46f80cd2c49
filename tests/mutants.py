"""Plants the faults of `mutants.yaml`, one at a time in a copy of the project, and runs the tests that must find each.

    python -m tests.mutants [--only TEXT] [--sample N]

Exits with 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PRODUCT = ("orchestrator", "workers")
_COPIED = (*PRODUCT, "deploy", "benchmarks", "tests", "troupe", "docs", "pyproject.toml", "README.md")
_TIMEOUT_S = 300.0
"""Longest run of a fault's tests. One that takes longer proves nothing: the machine may be busy."""
_TESTS_FAILED = 1
"""Exit status of pytest; the others mean that it ran no test."""


@dataclass(frozen=True)
class Mutant:
    """A fault of one place of the product."""

    fault: str
    """What is wrong with the product then."""
    old: str
    """Text that occurs once in the product."""
    new: str
    tests: tuple[str, ...]
    """Files and folders of tests; at least one test in them must fail."""

    def file(self, root: Path = ROOT) -> Path:
        """The module with the text. Raises ValueError unless it occurs once in all of them."""
        found = [path for path in sources(root) for _ in range(path.read_text().count(self.old))]
        if len(found) != 1:
            raise ValueError(f"'{self.fault}': its text occurs {len(found)} times: {self.old!r}")
        return found[0]


def sources(root: Path = ROOT) -> Iterator[Path]:
    """The modules of the product."""
    for folder in PRODUCT:
        yield from sorted((root / folder).rglob("*.py"))


def mutants() -> list[Mutant]:
    """All faults."""
    rows: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text())
    return [Mutant(row["fault"], row["old"], row["new"], tuple(row["tests"].split())) for row in rows]


def sample(faults: Sequence[Mutant], number: int) -> list[Mutant]:
    """So many of the faults, which change whenever the product does."""
    text = "".join(path.read_text() for path in sources())
    return random.Random(text).sample(faults, number)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the project, without what is built or downloaded."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".cache")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in _COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(source, target)
        os.symlink(ROOT / ".cache", Path(folder) / ".cache")
        yield Path(folder)


def survives(mutant: Mutant, root: Path) -> str:
    """Why the fault is not found by its tests, or empty if it is. The copy `root` is as before afterwards."""
    file = mutant.file(root)
    before = file.read_text()
    file.write_text(before.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", "not real and not long"]
    try:
        ended = subprocess.run(
            [*command, *mutant.tests],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"its tests did not end in {_TIMEOUT_S:g} s"
    finally:
        file.write_text(before)
    if ended.returncode == _TESTS_FAILED:
        return ""
    if ended.returncode == 0:
        return "its tests pass"
    return f"its tests were not run (status {ended.returncode}): {ended.stdout[-1000:]}{ended.stderr[-1000:]}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Plant faults and run the tests that must find them.")
    parser.add_argument("--only", default="", help="faults whose description has this text")
    parser.add_argument("--sample", type=int, help="number of faults to plant")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in mutants() if arguments.only in mutant.fault]
    if arguments.sample is not None:
        chosen = sample(chosen, min(arguments.sample, len(chosen)))
    survivors = 0
    with copied() as root:
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            why = survives(mutant, root)
            survivors += bool(why)
            verdict = f"SURVIVES, {why}" if why else "found"
            print(f"{number:3}/{len(chosen)} {time.monotonic() - began:5.0f} s  {mutant.fault}: {verdict}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults are found")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())

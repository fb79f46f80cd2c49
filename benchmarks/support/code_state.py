"""The state of the code that a benchmark measures: the product, and the benchmark's own modules.

A change of one benchmark leaves the results of the others as they are: of the same product, measured in the same way.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("troupe", "orchestrator", "workers", "deploy")
"""Folders whose content counts for every benchmark. Documentation and tests do not."""
_MODULE = re.compile(r"\bbenchmarks(?:\.\w+)+")
"""A module of a benchmark, in an import or in the path of a class."""
_ITSELF = Path("benchmarks", "support", "code_state.py")
"""Only names the state: it is no part of a measurement."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CodeState:
    """Identifies the measured files of a checkout."""

    digest: str
    """SHA-256 of the names and the contents of the product's files; equal for equal code, committed or not."""
    commit: str
    """The newest commit that changed the product, as `git describe --always` names it; empty without git."""
    dirty: bool
    """Whether the files of the product or the benchmark differ from those of the checkout's commit."""
    benchmark: str = ""
    """SHA-256 of the names and the contents of the benchmark's modules; empty: of none."""

    @property
    def text(self) -> str:
        """The commit as it is printed."""
        return f"{self.commit or 'code not named'}{' with changes' if self.dirty else ''}"

    def measures_as(self, other: CodeState) -> bool:
        """Whether the product and the benchmark are those of another state; code without a name is equal to none."""
        return bool(self.digest) and (self.digest, self.benchmark) == (other.digest, other.benchmark)


UNKNOWN = CodeState("", "", dirty=False)
"""Code outside of a git checkout, and that of results from before they named it: equal to no other."""


def code_state(root: Path = ROOT) -> CodeState:
    """The state of the checkout at `root`, with the benchmark that this process runs (`python -m benchmarks.NAME`).

    Files that git ignores do not count. UNKNOWN where git has no checkout.
    """
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    module: str = "" if specification is None else specification.name
    try:
        return of_benchmark(module, _product(root), root)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return UNKNOWN


def of_benchmark(module: str, code: CodeState, root: Path = ROOT) -> CodeState:
    """The state of the product with that of another benchmark; `module`: as `benchmarks.grpo_step`."""
    names = sorted(str(path) for path in modules_of(module, root))
    if not names or not code.digest:
        return replace(code, benchmark="")
    dirty = code.dirty or bool(_git(root, "status", "--porcelain", "--", *names).strip())
    return replace(code, dirty=dirty, benchmark=_digest(root, names))


def modules_of(module: str, root: Path = ROOT) -> set[Path]:
    """The files of a benchmark below `root`: its module, and what it and they import from `benchmarks/`."""
    found, waiting = set[Path](), _named(module, root)
    while waiting:
        path = waiting.pop()
        if path not in found and path != _ITSELF:
            found.add(path)
            waiting |= _named((root / path).read_text(), root)
    return found


def _named(text: str, root: Path) -> set[Path]:
    """The files of the modules that a text names."""
    paths = (Path(*match.split(".")) for match in _MODULE.findall(text))
    files = (next((own for own in _files(path) if (root / own).is_file()), None) for path in paths)
    return {file for file in files if file is not None}


def _files(path: Path) -> Iterable[Path]:
    """Where the module can be that this path, or the beginning of it, names."""
    return (one.with_suffix(".py") for one in (path, *path.parents) if len(one.parts) > 1)


def _product(root: Path) -> CodeState:
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PRODUCT)
    digest = _digest(root, sorted(set(filter(None, listed.split("\0")))))
    commit = _git(root, "log", "-1", "--format=%H", "--", *PRODUCT).strip()
    named = _git(root, "describe", "--always", "--abbrev=8", commit).strip() if commit else ""
    dirty = bool(_git(root, "status", "--porcelain", "--", *PRODUCT).strip())
    return CodeState(digest, named, dirty)


def _digest(root: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{_content(root / name)}\n".encode())
    return digest.hexdigest()


def _content(path: Path) -> str:
    """What a file holds: the target of a link, a digest of the bytes, or nothing where the file was removed."""
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout

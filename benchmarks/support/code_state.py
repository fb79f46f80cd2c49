"""The state of the code that a benchmark measures."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEASURED = ("troupe", "orchestrator", "workers", "deploy", "benchmarks")
"""Folders whose content counts. Documentation and tests do not."""
NOT_MEASURED = ("benchmarks/recorded", "benchmarks/baselines", "benchmarks/results")
"""What benchmarks write there."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CodeState:
    """Identifies the measured files of a checkout."""

    digest: str
    """SHA-256 of the names and the contents of all measured files; equal for equal code, committed or not."""
    commit: str
    """The newest commit that changed a measured file, as `git describe --always` names it; empty without git."""
    dirty: bool
    """Whether the measured files differ from those of the commit."""

    @property
    def text(self) -> str:
        """The commit as it is printed."""
        return f"{self.commit or 'code not named'}{' with changes' if self.dirty else ''}"


UNKNOWN = CodeState("", "", dirty=False)
"""Code outside of a git checkout, and that of results from before they named it: equal to no other."""


def code_state(root: Path = ROOT) -> CodeState:
    """The state of the checkout at `root`; files that git ignores do not count. UNKNOWN where git has no checkout."""
    try:
        return _state(root)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return UNKNOWN


def _state(root: Path) -> CodeState:
    paths = (*MEASURED, *(f":(exclude){folder}" for folder in NOT_MEASURED))
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths)
    digest = hashlib.sha256()
    for name in sorted(set(filter(None, listed.split("\0")))):
        digest.update(f"{name}\0{_content(root / name)}\n".encode())
    commit = _git(root, "log", "-1", "--format=%H", "--", *paths).strip()
    named = _git(root, "describe", "--always", "--abbrev=8", commit).strip() if commit else ""
    dirty = bool(_git(root, "status", "--porcelain", "--", *paths).strip())
    return CodeState(digest.hexdigest(), named, dirty)


def _content(path: Path) -> str:
    """What a file holds: the target of a link, a digest of the bytes, or nothing where the file was removed."""
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout

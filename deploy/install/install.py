"""Create an installation: `python3 deploy/install/install.py`, which `make setup` runs; `--gpu` for NVIDIA GPUs.

Needs only the standard library. Creates the virtual environment, installs the missing packages that
`deploy/install/cpu.lock` (or `gpu.lock`) pins, then Troupe itself in editable mode. It can run again at any time:
installed packages stay and missing ones are added.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NVIDIA = Path("/proc/driver/nvidia/version")
"""Exists if NVIDIA's driver is loaded."""
PROGRESS_S = 10
"""Seconds between lines of progress."""
OLDEST: tuple[int, int] = (3, 11)
PIN = re.compile(r'^([a-z0-9-]+)==([^;\s]+)(?:; platform_machine == "(\w+)")?$')

LIST_INSTALLED = """
import importlib.metadata, json, re
print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}))
"""

COMPILE = "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"


@dataclass(frozen=True)
class Build:
    """Packages for one kind of machine."""

    lock: Path
    newest: tuple[int, int]
    """The newest Python that the lock is resolved for; the oldest is OLDEST."""
    machines: tuple[str, ...]
    disk_gib: int


CPU = Build(ROOT / "deploy" / "install" / "cpu.lock", (3, 14), ("x86_64", "aarch64"), 8)
GPU = Build(ROOT / "deploy" / "install" / "gpu.lock", (3, 13), ("x86_64",), 16)


def say(text: str) -> None:
    """Print a line of progress and flush it, even if stdout is a file."""
    print(f"[setup] {text}", flush=True)


def problems(venv: Path, build: Build) -> list[str]:
    """Requirements of a build that this machine lacks, each with a remedy."""
    found: list[str] = []
    if not OLDEST <= sys.version_info[:2] <= build.newest:
        wanted = "{}.{} to {}.{}".format(*OLDEST, *build.newest)
        found.append(
            f"Python {wanted} is needed, this is {platform.python_version()}: run make PYTHON=/path/to/python ..."
        )
    if sys.platform != "linux":
        found.append(f"vLLM supports only Linux, this is {sys.platform}: use a Linux machine, WSL or a container.")
    if platform.machine() not in build.machines:
        found.append(f"{build.lock.name} is for {' and '.join(build.machines)}, this is {platform.machine()}.")
    debian: list[str] = []
    if importlib.util.find_spec("ensurepip") is None:
        debian.append("python3-venv")
    # DeepSpeed and vLLM compile small extensions at first use.
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        debian.append("python3-dev")
    if not shutil.which(os.environ.get("CXX", "g++").split()[0]):
        debian.append("g++")
    if not _loads("libnuma.so.1"):
        debian.append("libnuma1")
    if debian:
        found.append(f"system packages are missing (Debian names): apt-get install {' '.join(debian)}")
    where = next(folder for folder in (venv, *venv.parents) if folder.exists())
    free = shutil.disk_usage(where).free / 2**30
    if not venv.exists() and free < build.disk_gib:
        found.append(f"{build.disk_gib} GiB of disk are needed, {where} has {free:.1f} GiB free.")
    if build is CPU and platform.machine() == "x86_64" and "avx2" not in Path("/proc/cpuinfo").read_text():
        found.append("vLLM's CPU build needs a processor with AVX2.")
    return found


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def pins(lock: Path) -> dict[str, str]:
    """The lock's versions by distribution name, for this machine. Raises SystemExit for a line that is not a pin."""
    wanted: dict[str, str] = {}
    for line in lock.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = PIN.match(line)
        if match is None:
            raise SystemExit(f"{lock}: not a pin: {line!r}; write it again: make lock")
        name, version, machine = match.groups()
        if machine in (None, platform.machine()):
            wanted[name] = version
    return wanted


class VirtualEnvironment:
    """A virtual environment, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "install.log"
        """What pip printed."""

    def make(self) -> None:
        """Create the environment, unless it already has a supported Python with a working pip."""
        check = f"import sys, pip; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {CPU.newest})"
        if self.python.exists() and _quiet([str(self.python), "-I", "-c", check]):
            return
        say(f"creating {self.folder} with Python {platform.python_version()}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)

    def lacks(self, wanted: dict[str, str]) -> list[str]:
        """The pins that are not installed, or are installed at another version. For `X+cpu`, `X` is enough."""
        answer = subprocess.run(
            [str(self.python), "-I", "-c", LIST_INSTALLED], check=True, capture_output=True, text=True
        )
        installed = json.loads(answer.stdout)
        return [
            f"{name}=={version}"
            for name, version in wanted.items()
            if installed.get(name) not in (version, version.removesuffix("+cpu"))
        ]

    def pip(self, *arguments: str) -> bool:
        """Run `pip install` and return whether it succeeded. Shows how far it is; its thousand lines go to `log`."""
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
            "--no-compile",
        ]
        # Build tools must be found although the environment is not activated.
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore", "PIP_USER": "0"}
        # DeepSpeed's build fails on a GPU without a CUDA toolkit; the operations that need one are not used.
        env["DS_IGNORE_CUDA_DETECTION"] = "1"
        # pip would treat packages on PYTHONPATH as installed.
        env.pop("PYTHONPATH", None)
        pins, fetched, shown = sum("==" in argument for argument in arguments), 0, time.monotonic()
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with self.log.open("a") as log, subprocess.Popen([*command, *arguments], env=env, **pipe) as process:
            for line in process.stdout or ():
                log.write(line)
                fetched += line.startswith("Collecting ")
                installs = line.startswith("Installing collected packages")
                if pins and (installs or time.monotonic() - shown > PROGRESS_S):
                    of = f" of {pins}" if fetched <= pins else ""  # a pin may bring others
                    say("  installing them" if installs else f"  {fetched}{of} packages fetched")
                    shown, pins = time.monotonic(), 0 if installs else pins
        return process.returncode == 0

    def compile(self) -> None:
        """Write the bytecode of all packages, on every core: pip writes it on one."""
        _quiet([str(self.python), "-c", COMPILE])

    def last_error(self) -> str:
        """The last error that pip printed; empty if none."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.lower().startswith("error")), "")


def _quiet(command: list[str]) -> bool:
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


@dataclass(frozen=True)
class TorchSource:
    """One way to get torch."""

    say: str
    arguments: tuple[str, ...]
    """For `pip install`."""


def torch_sources(version: str) -> list[TorchSource]:
    """Sources of torch, best first. A CPU build comes from PyTorch's own index, or from the machine's package index
    (a mirror). PyPI has no CPU build for Linux: its CUDA build, which needs CUDA's libraries, is the last resort."""
    public = version.removesuffix("+cpu")
    if public == version:
        return [TorchSource(f"installing torch {version} with CUDA's libraries (2.7 GB)", (f"torch=={version}",))]
    pinned = ("--no-deps", f"torch=={version}")
    return [
        TorchSource(
            f"installing torch {version} from PyTorch's index (about 200 MB)",
            (*pinned, "--index-url", TORCH_INDEX, "--timeout", "15", "--retries", "2"),
        ),
        TorchSource(f"PyTorch's index is unreachable or lacks torch {version}; trying this machine's index", pinned),
        TorchSource(
            f"no CPU build of torch can be reached; installing torch {public} with CUDA from this machine's index. It "
            "works on CPUs, but downloads 2.7 GB instead of 0.2 GB and needs 4 GB more of disk. To avoid this, "
            f"make {TORCH_INDEX} reachable",
            (f"torch=={public}",),
        ),
    ]


def install_torch(environment: VirtualEnvironment, version: str, lock: Path) -> bool:
    """Install torch from the first source that has it. Its dependencies have the lock's versions."""
    # Of the CPU's lock, torch is another build, and triton is the version that vLLM wants.
    free = ("torch", "triton") if version.endswith("+cpu") else ()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={pin}\n" for name, pin in pins(lock).items() if name not in free)
        constraints.flush()
        for source in torch_sources(version):
            say(source.say)
            limits = () if "--no-deps" in source.arguments else ("--constraint", constraints.name)
            if environment.pip(*source.arguments, *limits):
                return True
    return False


def install_pinned(environment: VirtualEnvironment, lock: Path) -> bool:
    """Install the missing pins: first pip and setuptools, then torch, then the rest; returns whether all are there."""
    wanted = pins(lock)
    missing = environment.lacks(wanted)
    if not missing:
        say(f"all {len(wanted)} pinned packages are installed")
        return True
    say(f"installing {len(missing)} of {len(wanted)} pinned packages; the first installation takes some minutes")
    tools = [pin for pin in missing if pin.split("==")[0] in ("pip", "setuptools")]
    if tools and not environment.pip("--no-deps", *tools):
        return False
    if f"torch=={wanted['torch']}" in missing and not install_torch(environment, wanted["torch"], lock):
        return False
    # No build isolation, so that the few source distributions build with the pinned setuptools, not the newest.
    rest = environment.lacks(wanted)
    if rest and not environment.pip("--no-deps", "--no-build-isolation", *rest):
        return False
    environment.compile()
    return not environment.lacks(wanted)


def incomplete(environment: VirtualEnvironment) -> int:
    """Say what stopped the installation; returns exit code 1."""
    why = environment.last_error() or "pip failed"
    print(f"[setup] incomplete: {why}", file=sys.stderr)
    print(f"[setup] all of pip's output: {environment.log}; run the command again to resume", file=sys.stderr)
    return 1


def main() -> int:
    """Check the machine, then install; returns exit code 0 if everything is installed."""
    parser = argparse.ArgumentParser(description="Create Troupe's installation in a virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the virtual environment")
    parser.add_argument("--gpu", action="store_true", help="install the builds for NVIDIA GPUs, from gpu.lock")
    parser.add_argument(
        "--pins-only", action="store_true", help="install the pinned packages without Troupe (for images)"
    )
    arguments = parser.parse_args()
    venv: Path = arguments.venv.absolute()
    build = GPU if arguments.gpu else CPU
    started = time.monotonic()
    if build is CPU and NVIDIA.exists():
        say("installing for CPUs although this machine has an NVIDIA driver; for its GPUs: make GPU=1 ..., or --gpu")
    if found := problems(venv, build):
        print("[setup] this machine is not ready:", *found, sep="\n  - ", file=sys.stderr)
        return 1
    environment = VirtualEnvironment(venv)
    environment.make()
    if not install_pinned(environment, build.lock):
        return incomplete(environment)
    if arguments.pins_only:
        return 0
    say("installing troupe-rl in editable mode")
    if not environment.pip("--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)):
        return incomplete(environment)
    say(f"done in {time.monotonic() - started:.0f} s: {venv / 'bin' / 'troupe'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

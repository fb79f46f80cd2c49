"""Create the CPU installation: `python3 deploy/install/install.py`, which `make setup` runs.

Needs only the standard library. Creates the virtual environment, installs the missing packages that
`deploy/install/cpu.lock` pins, then Troupe itself in editable mode. It can run again at any time: installed packages
stay and missing ones are added.
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "install" / "cpu.lock"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST, NEWEST = (3, 11), (3, 14)
DISK_GIB = 8
PIN = re.compile(r'^([a-z0-9-]+)==([^;\s]+)(?:; platform_machine == "(\w+)")?$')

LIST_INSTALLED = """
import importlib.metadata, json, re
print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}))
"""


def say(text: str) -> None:
    """Print a line of progress and flush it, even where stdout is a file."""
    print(f"[setup] {text}", flush=True)


def problems(venv: Path) -> list[str]:
    """What this machine lacks, each with a remedy."""
    found: list[str] = []
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        wanted = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
        found.append(
            f"Python {wanted} is needed, this is {platform.python_version()}: run make PYTHON=/path/to/python ..."
        )
    if sys.platform != "linux":
        found.append(f"vLLM supports only Linux, this is {sys.platform}: use a Linux machine, WSL or a container.")
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
    if not venv.exists() and free < DISK_GIB:
        found.append(f"{DISK_GIB} GiB of disk are needed, {where} has {free:.1f} GiB free.")
    if platform.machine() == "x86_64" and "avx2" not in Path("/proc/cpuinfo").read_text():
        found.append("vLLM's CPU build needs a processor with AVX2.")
    return found


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def pins() -> dict[str, str]:
    """The lock's versions by distribution name, for this machine. Raises SystemExit for a line that is not a pin."""
    wanted: dict[str, str] = {}
    for line in LOCK.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = PIN.match(line)
        if match is None:
            raise SystemExit(f"{LOCK}: not a pin: {line!r}; rewrite the lock with deploy/install/lock.py")
        name, version, machine = match.groups()
        if machine in (None, platform.machine()):
            wanted[name] = version
    return wanted


class Environment:
    """A virtual environment, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def make(self) -> None:
        """Create the environment, unless it already has a supported Python with a working pip."""
        check = f"import sys, pip; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
        if self.python.exists() and _quiet([str(self.python), "-I", "-c", check]):
            return
        say(f"creating {self.folder} with Python {platform.python_version()}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)

    def lacks(self, wanted: dict[str, str]) -> list[str]:
        """The pins that are not installed, or are installed at another version."""
        answer = subprocess.run(
            [str(self.python), "-I", "-c", LIST_INSTALLED], check=True, capture_output=True, text=True
        )
        installed = json.loads(answer.stdout)
        return [f"{name}=={version}" for name, version in wanted.items() if installed.get(name) != version]

    def pip(self, *arguments: str) -> bool:
        """Run `pip install`, which prints its own progress; returns whether it succeeded."""
        command = [str(self.python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps"]
        # Build tools must be found although the environment is not activated.
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore", "PIP_USER": "0"}
        # pip would treat packages on PYTHONPATH as installed.
        env.pop("PYTHONPATH", None)
        return subprocess.run([*command, *arguments], env=env).returncode == 0


def _quiet(command: list[str]) -> bool:
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def install_torch(environment: Environment, version: str) -> bool:
    """Install the CPU build of torch from PyTorch's index, or else from the machine's own package index.

    The second index is for machines that reach only a mirror. It cannot install gigabytes of CUDA: the pin names the
    build (`+cpu`), which no CUDA build satisfies.
    """
    pin = f"torch=={version}"
    say(f"installing {pin} from PyTorch's index (about 200 MB)")
    if environment.pip(pin, "--index-url", TORCH_INDEX, "--timeout", "15", "--retries", "2"):
        return True
    say(f"PyTorch's index is unreachable or lacks {pin}; trying this machine's package index")
    return environment.pip(pin)


def install_pinned(environment: Environment, wanted: dict[str, str]) -> bool:
    """Install the missing pins: first pip and setuptools, then torch, then the rest; returns whether all are there."""
    missing = environment.lacks(wanted)
    if not missing:
        say(f"all {len(wanted)} pinned packages are installed")
        return True
    say(f"installing {len(missing)} of {len(wanted)} pinned packages; the first installation takes some minutes")
    tools = [pin for pin in missing if pin.split("==")[0] in ("pip", "setuptools")]
    if tools and not environment.pip(*tools):
        return False
    if f"torch=={wanted['torch']}" in missing and not install_torch(environment, wanted["torch"]):
        return False
    # No build isolation, so that the few source distributions build with the pinned setuptools, not the newest.
    rest = environment.lacks(wanted)
    if rest and not environment.pip("--no-build-isolation", *rest):
        return False
    return not environment.lacks(wanted)


def main() -> int:
    """Check the machine, then install; returns exit code 0 if everything is installed."""
    parser = argparse.ArgumentParser(description="Create Troupe's CPU installation.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the virtual environment")
    parser.add_argument(
        "--pins-only", action="store_true", help="install the pinned packages without Troupe (for images)"
    )
    arguments = parser.parse_args()
    venv: Path = arguments.venv.absolute()
    started = time.monotonic()
    if found := problems(venv):
        print("[setup] this machine is not ready:", *found, sep="\n  - ", file=sys.stderr)
        return 1
    environment = Environment(venv)
    environment.make()
    if not install_pinned(environment, pins()):
        print("[setup] incomplete, see pip's message above; run the command again to resume", file=sys.stderr)
        return 1
    if arguments.pins_only:
        return 0
    say("installing troupe-rl in editable mode")
    if not environment.pip("--quiet", "--no-build-isolation", "--editable", str(ROOT)):
        return 1
    say(f"done in {time.monotonic() - started:.0f} s: {venv / 'bin' / 'troupe'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make the CPU installation: `python3 deploy/install.py` (what `make setup` runs).

Uses the standard library only. Makes the virtual environment, installs what `deploy/cpu.lock` pins and is not there
yet, then Troupe itself, editable. May be run again at any time: what is there stays, what is missing is added.
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

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "cpu.lock"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST, NEWEST = (3, 11), (3, 14)
DISK_GIB = 8
PIN = re.compile(r'^([a-z0-9-]+)==([^;\s]+)(?:; platform_machine == "(\w+)")?$')

LIST_INSTALLED = """
import importlib.metadata, json, re
print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}))
"""


def say(text: str) -> None:
    """A line of progress, at once even where the output is a file."""
    print(f"[setup] {text}", flush=True)


def problems(venv: Path) -> list[str]:
    """What this machine lacks, each with its remedy."""
    found: list[str] = []
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        wanted = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
        found.append(f"Python {wanted} is needed, this is {platform.python_version()}: make PYTHON=/path/to/python ...")
    if sys.platform != "linux":
        found.append(
            f"vLLM has builds for Linux only, this is {sys.platform}: use a Linux machine, WSL or a container."
        )
    debian: list[str] = []
    if importlib.util.find_spec("ensurepip") is None:
        debian.append("python3-venv")
    # DeepSpeed and vLLM compile small extensions when first used.
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        debian.append("python3-dev")
    if not shutil.which(os.environ.get("CXX", "g++").split()[0]):
        debian.append("g++")
    if not _loads("libnuma.so.1"):
        debian.append("libnuma1")
    if debian:
        found.append(f"missing from the system (names as in Debian): apt-get install {' '.join(debian)}")
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
    """Name to version for this machine, as the lock says."""
    wanted: dict[str, str] = {}
    for line in LOCK.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = PIN.match(line)
        if match is None:
            raise SystemExit(f"{LOCK}: not a pin: {line!r}")
        name, version, machine = match.groups()
        if machine in (None, platform.machine()):
            wanted[name] = version
    return wanted


class Environment:
    """A virtual environment, new or old."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def make(self) -> None:
        """Make it, unless there is one with a pip that answers on a Python that is new enough."""
        check = f"import sys, pip; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
        if self.python.exists() and _quiet([str(self.python), "-I", "-c", check]):
            return
        say(f"making {self.folder} with Python {platform.python_version()}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)

    def lacks(self, wanted: dict[str, str]) -> list[str]:
        """The pins that are not installed, or at another version."""
        answer = subprocess.run(
            [str(self.python), "-I", "-c", LIST_INSTALLED], check=True, capture_output=True, text=True
        )
        installed = json.loads(answer.stdout)
        return [f"{name}=={version}" for name, version in wanted.items() if installed.get(name) != version]

    def pip(self, *arguments: str) -> bool:
        """Run `pip install`; pip's own output is the progress."""
        command = [str(self.python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps"]
        # Build tools and compilers must be found without the environment being activated.
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore", "PIP_USER": "0"}
        # Or pip would take what lies there for installed.
        env.pop("PYTHONPATH", None)
        return subprocess.run([*command, *arguments], env=env).returncode == 0


def _quiet(command: list[str]) -> bool:
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def install_torch(environment: Environment, version: str) -> bool:
    """Install the CPU build. The pin names the build (`+cpu`), which no CUDA build satisfies, so the second try,
    for machines that reach a mirror and not PyTorch's index, cannot end with gigabytes of CUDA."""
    pin = f"torch=={version}"
    say(f"installing {pin} from PyTorch's index (about 200 MB)")
    if environment.pip(pin, "--index-url", TORCH_INDEX, "--timeout", "15", "--retries", "2"):
        return True
    say(f"not reached or not there; trying the package index of this machine for {pin}")
    return environment.pip(pin)


def install_pinned(environment: Environment, wanted: dict[str, str]) -> bool:
    """Install what the lock pins and the environment lacks: pip and setuptools, torch, the rest."""
    missing = environment.lacks(wanted)
    if not missing:
        say(f"all {len(wanted)} pinned packages are there")
        return True
    say(f"{len(missing)} of {len(wanted)} pinned packages are missing; the first time takes some minutes")
    tools = [pin for pin in missing if pin.split("==")[0] in ("pip", "setuptools")]
    if tools and not environment.pip(*tools):
        return False
    if f"torch=={wanted['torch']}" in missing and not install_torch(environment, wanted["torch"]):
        return False
    # No build isolation: the few source distributions build with the pinned setuptools, not with the newest.
    rest = environment.lacks(wanted)
    if rest and not environment.pip("--no-build-isolation", *rest):
        return False
    return not environment.lacks(wanted)


def main() -> int:
    """Check the machine, then install; 0 if all that is pinned is installed."""
    parser = argparse.ArgumentParser(description="Make Troupe's CPU installation.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the virtual environment")
    parser.add_argument("--pins-only", action="store_true", help="what the lock pins, without Troupe (for an image)")
    arguments = parser.parse_args()
    venv: Path = arguments.venv.absolute()
    started = time.monotonic()
    if found := problems(venv):
        print("[setup] this machine is not ready:", *found, sep="\n  - ", file=sys.stderr)
        return 1
    environment = Environment(venv)
    environment.make()
    if not install_pinned(environment, pins()):
        print("[setup] not complete (pip's message is above); run it again to go on from here", file=sys.stderr)
        return 1
    if arguments.pins_only:
        return 0
    say("installing troupe-rl, editable")
    if not environment.pip("--quiet", "--no-build-isolation", "--editable", str(ROOT)):
        return 1
    say(f"done in {time.monotonic() - started:.0f} s: {venv / 'bin' / 'troupe'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

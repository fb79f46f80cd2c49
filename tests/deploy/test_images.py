"""The Dockerfiles and .dockerignore, checked by reading them: the tests do not build images."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deploy.install import install
from tests.conftest import ROOT
from troupe.orchestrator.platforms.kubernetes.documents import USER
from troupe.orchestrator.platforms.kubernetes.options import WORKSPACE

IMAGES = ("cpu", "gpu")


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of each instruction of a Dockerfile, with continued lines joined."""
    text = (ROOT / "deploy" / "images" / f"Dockerfile.{image}").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in found]


def of(image: str, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(image) if instruction == name]


def copied(image: str) -> set[str]:
    """The paths of the repository that a Dockerfile copies."""
    return {source for rest in of(image, "COPY") for source in shlex.split(rest)[:-1]}


def admitted(path: str) -> bool:
    """Whether .dockerignore admits a path: the last pattern that matches it, or a folder above it, decides."""
    keep = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern, allow = line.removeprefix("!"), line.startswith("!")
        parts = path.split("/")
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        one_level = [prefix for prefix in prefixes if prefix.count("/") == pattern.count("/")]
        names = parts if pattern.startswith("**/") else one_level
        if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            keep = allow
    return keep


@pytest.mark.parametrize("image", IMAGES)
def test_the_base_is_pinned_by_a_full_tag_and_its_digest(image: str) -> None:
    (base,) = of(image, "FROM")
    assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+@sha256:[0-9a-f]{64}", base)


@pytest.mark.parametrize("image", IMAGES)
def test_the_user_is_a_number_and_not_root(image: str) -> None:
    assert of(image, "USER")[-1] == f"{USER}:{USER}"
    assert instructions(image)[-1][0] == "CMD"
    assert of(image, "WORKDIR")[-1] == WORKSPACE


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_an_init(image: str) -> None:
    """Without one, nobody reaps the processes of a driver that was killed, and its workers stay as zombies."""
    assert any("apt-get install" in run and "tini" in shlex.split(run) for run in of(image, "RUN"))
    (entry,) = of(image, "ENTRYPOINT")
    assert json.loads(entry) == ["/usr/bin/tini", "--"]


@pytest.mark.parametrize("image", IMAGES)
def test_what_the_wheel_needs_is_copied_and_reaches_the_build(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    # `troupe` has links to the folders of the checkout.
    packages = {name.rstrip("*").replace(".", "/").removeprefix("troupe/") for name in found}
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *packages}
    assert needed <= copied(image) and "deploy/specs" in packages
    for rest in of(image, "COPY"):
        *sources, target = shlex.split(rest)
        where = ["." if "/" not in source else f"{Path(source).parent}" for source in sources]
        folders = [target] if len(sources) == 1 and (ROOT / sources[0]).is_dir() else []
        assert folders == sources if folders else {target.rstrip("/")} == set(where), "paths are those of the checkout"
    for source in copied(image):
        assert (ROOT / source).exists() and admitted(source), source


def test_only_what_is_copied_reaches_the_build() -> None:
    wanted = copied("cpu") | copied("gpu")
    for path in (
        ".git/config",
        ".env",
        ".cache/models/m",
        "runs/a",
        "deploy/install/lock.py",
        "tests/fakes.py",
        "key.pem",
    ):
        assert not admitted(path), path
    for folder in ("orchestrator", "workers"):
        assert admitted(f"{folder}/__init__.py") and not admitted(f"{folder}/__pycache__/a.pyc")
    assert admitted("deploy/specs/data/texts.jsonl") and not admitted("deploy/grafana/troupe.json")
    assert all(admitted(path) for path in wanted)


@pytest.mark.parametrize("image", IMAGES)
def test_no_secret_and_no_leftovers_in_a_layer(image: str) -> None:
    text = (ROOT / "deploy" / "images" / f"Dockerfile.{image}").read_text()
    assert not re.search(r"token|secret|password|api_key", text, re.IGNORECASE)
    assert of(image, "ARG") == (["EFA_INSTALLER", "EFA_SHA256"] if image == "gpu" else [])
    assert of(image, "ADD") == []
    for run in of(image, "RUN"):
        assert "apt-get update" not in run or "rm -rf /var/lib/apt/lists/*" in run
    assert any("PIP_NO_CACHE_DIR=1" in env for env in of(image, "ENV"))


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_installed_from_its_lock_and_troupe_without_resolving_anything(image: str) -> None:
    (copy,) = (shlex.split(rest) for rest in of(image, "COPY") if "deploy/install/install.py" in rest)
    assert copy == ["deploy/install/install.py", f"deploy/install/{image}.lock", "deploy/install/"]
    (run,) = (shlex.split(rest) for rest in of(image, "RUN") if "deploy/install/install.py" in rest)
    assert run[1:] == ["deploy/install/install.py", *(["--gpu"] * (image == "gpu")), "--venv", "venv", "--pins-only"]
    (own,) = (shlex.split(rest) for rest in of(image, "RUN") if "pip install" in rest)
    assert own == ["venv/bin/pip", "install", "--no-deps", "--no-build-isolation", "."]
    steps = [rest for name, rest in instructions(image) if name in ("COPY", "RUN")]
    assert steps.index(shlex.join(run)) < steps.index("orchestrator orchestrator") < steps.index(shlex.join(own))
    environment = " ".join(of(image, "ENV"))
    assert f"PATH={of(image, 'WORKDIR')[0]}/venv/bin:$PATH" in environment, "the command is the environment's"


@pytest.mark.parametrize("image", IMAGES)
def test_the_paths_that_the_steps_of_an_image_run_exist(image: str) -> None:
    """Files were copied before; programs come from the base image, from packages or from the environment."""
    there = {"apt-get", "rm", "useradd", "userdel", "install", "python", "python3", "sh"}
    made: set[str] = set()
    for name, rest in instructions(image):
        if name == "COPY":
            made |= {f"deploy/install/{Path(source).name}" for source in shlex.split(rest)[:-1]}
        if name == "RUN":
            for command in rest.split("&&"):
                program, *words = shlex.split(command)
                assert program in there, command
                assert {word for word in words if word.endswith((".py", ".sh", ".lock"))} <= made, command
            there |= {"venv/bin/pip"} if "--venv venv" in rest else set()


def test_an_image_has_a_python_that_its_lock_is_resolved_for() -> None:
    (cpu,), (gpu,) = of("cpu", "FROM"), of("gpu", "FROM")
    cpu_python = tuple(int(part) for part in cpu.removeprefix("python:").split(".")[:2])
    assert install.OLDEST <= cpu_python <= install.CPU.newest
    assert "ubuntu24.04@" in gpu, "whose python3 is 3.12"
    assert install.OLDEST <= (3, 12) <= install.GPU.newest


def test_pins_only_installs_no_package_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    locks: list[Path] = []
    monkeypatch.setattr(install, "problems", lambda venv, build: [])
    monkeypatch.setattr(install, "install_pinned", lambda environment, lock: locks.append(lock) is None)
    monkeypatch.setattr(install.VirtualEnvironment, "make", lambda self: None)
    monkeypatch.setattr(install.VirtualEnvironment, "pip", lambda self, *arguments: asked.append(arguments) is None)
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path), "--pins-only"])
    assert install.main() == 0 and asked == []
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path), "--gpu"])
    assert install.main() == 0 and len(asked) == 1
    assert locks == [install.CPU.lock, install.GPU.lock]


STUB = """#!{sh}
echo {name} "$@" >> log
case {name} in
  wget) echo archive > aws-efa-installer-1.49.0.tar.gz ;;
  tar) mkdir aws-efa-installer; cp {stubs}/installer aws-efa-installer/efa_installer.sh ;;
esac
"""
ARCHIVE = hashlib.sha256(b"archive\n").hexdigest()


@pytest.mark.parametrize(
    ("arguments", "code", "ran"),
    [
        (("", ""), 0, []),
        (("1.49.0", ""), 2, []),
        (("1.49.0", "0" * 64), 1, ["wget"]),
        (("1.49.0", ARCHIVE), 0, ["wget", "tar", "apt-get", "apt-get", "installer", "ldconfig", "tee", "rm"]),
    ],
)
def test_efa_is_installed_only_from_the_archive_that_was_asked_for(
    arguments: tuple[str, str], code: int, ran: list[str], tmp_path: Path
) -> None:
    """The script with programs that log their calls; the installer's stands for AWS's."""
    (stubs := tmp_path / "stubs").mkdir()
    (folder := tmp_path / "folder").mkdir()
    for name in ("mkdir", "cp", "sha256sum"):
        (stubs / name).symlink_to(shutil.which(name) or name)
    fakes = {"mktemp": f"#!/bin/sh\necho {folder}\n"}
    for name in ("wget", "tar", "apt-get", "installer", "ldconfig", "tee", "rm"):
        log = "../log" if name in ("installer", "ldconfig", "tee", "rm") else "log"
        fakes[name] = STUB.format(sh="/bin/sh", name=name, stubs=stubs).replace(">> log", f">> {log}")
    for name, text in fakes.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    script = (ROOT / "deploy" / "install" / "efa.sh", *arguments)
    done = subprocess.run(["/bin/sh", *script], env={"PATH": str(stubs)}, capture_output=True, text=True, timeout=60)
    calls = (folder / "log").read_text().splitlines() if ran else []
    assert (done.returncode, [call.split()[0] for call in calls]) == (code, ran), done.stderr
    assert ("needs EFA_SHA256" in done.stderr) == (code == 2)
    if code == 0 and ran:
        assert calls[3:5] == [
            "apt-get remove --yes ibverbs-providers libibverbs1",
            "installer --yes --skip-kmod --skip-limit-conf --no-verify",
        ]
        assert calls[0].endswith("https://efa-installer.amazonaws.com/aws-efa-installer-1.49.0.tar.gz")


def test_the_libraries_that_efa_replaces_were_installed() -> None:
    steps = [rest for name, rest in instructions("gpu") if name == "RUN"]
    (own,) = (number for number, rest in enumerate(steps) if "efa.sh" in rest)
    removed = "ibverbs-providers libibverbs1"
    assert removed in steps[own - 1] and removed in (ROOT / "deploy" / "install" / "efa.sh").read_text()
    assert shlex.split(steps[own]) == ["sh", "deploy/install/efa.sh", "$EFA_INSTALLER", "$EFA_SHA256"]

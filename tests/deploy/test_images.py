"""The Dockerfiles and .dockerignore, checked by reading them: the tests do not build images."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deploy.install import install
from orchestrator.platforms.kubernetes.documents import USER
from orchestrator.platforms.kubernetes.options import WORKSPACE
from tests.conftest import ROOT

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
def test_the_base_is_pinned_by_a_full_tag(image: str) -> None:
    (base,) = of(image, "FROM")
    assert re.search(r":\d+\.\d+\.\d+-", base) and "latest" not in base


@pytest.mark.parametrize("image", IMAGES)
def test_the_user_is_a_number_and_not_root(image: str) -> None:
    assert of(image, "USER")[-1] == f"{USER}:{USER}"
    assert instructions(image)[-1][0] == "CMD"
    assert of(image, "WORKDIR")[-1] == WORKSPACE


@pytest.mark.parametrize("image", IMAGES)
def test_what_the_wheel_needs_is_copied_and_reaches_the_build(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *packages}
    assert needed <= copied(image)
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
    assert all(admitted(path) for path in wanted)


@pytest.mark.parametrize("image", IMAGES)
def test_no_secret_and_no_leftovers_in_a_layer(image: str) -> None:
    text = (ROOT / "deploy" / "images" / f"Dockerfile.{image}").read_text()
    assert not re.search(r"token|secret|password|api_key", text, re.IGNORECASE)
    assert of(image, "ARG") == of(image, "ADD") == []
    for run in of(image, "RUN"):
        assert "apt-get update" not in run or "rm -rf /var/lib/apt/lists/*" in run
    assert any("PIP_NO_CACHE_DIR=1" in env for env in of(image, "ENV"))


def test_the_cpu_image_is_installed_from_the_lock_and_the_gpu_image_from_its_extra() -> None:
    assert any("deploy/install/install.py" in run and "--pins-only" in run for run in of("cpu", "RUN"))
    (copy,) = (shlex.split(rest) for rest in of("cpu", "COPY") if "deploy/install/install.py" in rest)
    assert copy[-1] == "deploy/install/", "install.py and cpu.lock keep their paths in the image"
    assert any('".[gpu]"' in run for run in of("gpu", "RUN"))


def test_pins_only_installs_no_package_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "problems", lambda venv: [])
    monkeypatch.setattr(install, "install_pinned", lambda environment, wanted: True)
    monkeypatch.setattr(install.Environment, "make", lambda self: None)
    monkeypatch.setattr(install.Environment, "pip", lambda self, *arguments: asked.append(arguments) is None)
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path), "--pins-only"])
    assert install.main() == 0 and asked == []
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path)])
    assert install.main() == 0 and len(asked) == 1

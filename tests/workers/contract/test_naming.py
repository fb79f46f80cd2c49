"""Names of modules: those from before the package `troupe`, and folders of the user that have the same names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import troupe.algorithms
import troupe.environments
import troupe.rewards
import troupe.sandbox
from tests.conftest import ROOT
from troupe.workers.agents.environments.base import EnvironmentLoadError
from troupe.workers.agents.environments.base import load as load_environment
from troupe.workers.algorithms.custom import CustomAlgorithmError, load_custom
from troupe.workers.contract.config import CustomConfig
from troupe.workers.rewards.loading import RewardFunctionError
from troupe.workers.rewards.loading import load as load_reward


@pytest.mark.parametrize("module", [troupe.algorithms, troupe.environments, troupe.rewards, troupe.sandbox])
def test_a_public_module_has_what_it_lists(module: object) -> None:
    names = vars(module)["__all__"]
    assert names == sorted(names) and set(names) <= set(vars(module))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("workers.environments.retry:Retry", "Troupe's workers.environments is troupe.environments now"),
        ("troupe.workers.environments.retry:Retry", "Troupe's troupe.workers.environments is troupe.environments now"),
        ("workers.rollout:RolloutWorker", "Troupe's workers is troupe.workers now"),
        ("deploy.examples.sums_agent:solve", "Troupe's deploy.examples is troupe.deploy.examples now"),
    ],
)
@pytest.mark.parametrize("folder", [ROOT, Path("/")], ids=["in the checkout", "elsewhere"])
def test_an_old_name_is_refused_with_todays_name(
    name: str, hint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(EnvironmentLoadError, match=hint):
        load_environment(name, {})
    with pytest.raises(RewardFunctionError, match=hint):
        load_reward(name, {})
    with pytest.raises(CustomAlgorithmError, match=hint):
        load_custom(CustomConfig(name=name))


def test_an_old_name_in_a_users_module_is_refused_with_todays_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_old_environment.py").write_text("from orchestrator.nowhere import Environment\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentLoadError, match=r"Troupe's orchestrator is troupe\.orchestrator now"):
        load_environment("own_old_environment:Game", {})


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

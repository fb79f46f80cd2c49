"""The algorithm of the guide, as a user writes it: checked by command, and learning on the real stack."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real.commands import GRPO, Command, Run, ledger_balances, running, troupe_command

pytestmark = pytest.mark.real

GUIDE = ROOT / "docs" / "guides" / "algorithm.md"
NAME = "my_algorithms:median_grpo"


@pytest.fixture
def path_with_the_guides_module(tmp_path: Path) -> str:
    """PYTHONPATH with a folder that holds the module of the page."""
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) < 30
    (tmp_path / "my_algorithms.py").write_text(code)
    return os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_the_guides_output_of_the_checks_is_the_commands(path_with_the_guides_module: str, tmp_path: Path) -> None:
    (shown,) = re.findall(r"--check --args '\{width: 0.3\}'\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    arguments = troupe_command("algorithms", NAME, "--check", "--args", "{width: 0.3}")
    with running(Command(tmp_path, arguments, {"PYTHONPATH": path_with_the_guides_module})) as command:
        assert command.wait() == 0, command.output
        assert command.stdout == shown


def test_the_guides_algorithm_learns(path_with_the_guides_module: str, tmp_path: Path) -> None:
    overrides = [f"algorithm.name={NAME}", "algorithm.args={width: 0.3}", "schedule.minibatches=2", "schedule.steps=6"]
    env = {"PYTHONPATH": path_with_the_guides_module}
    with running(Run(tmp_path, GRPO, *overrides, name="own", env=env)) as run:
        assert run.wait() == 0, run.output
        rewards = [line["reward/mean"] for line in run.metrics]
        assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.1
        assert any(line["policy/beyond_width"] > 0 for line in run.metrics)
        assert ledger_balances(run.metrics[-1])

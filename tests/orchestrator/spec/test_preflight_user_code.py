"""Reward functions are loaded with their arguments before anything starts, in a process of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.spec.checks.machine import missing, unusable_functions
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.workers.contract.reward_config import RewardFunctionConfig

PATH = "roles.reward.functions"


def problems(*functions: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return list(unusable_functions([RewardFunctionConfig(name=name, args=args) for name, args in functions], PATH))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's modules, which is the current directory."""
    modules = {
        "good": "print('hello')\ndef score(response, answer, metadata, scale=1.0): return scale\n",
        "several": "def score(responses, answers, metadata): return [1.0]\nclass Score: pass\n",
        "broken": "import nothing_of_that_name\n",
        "leaves": "import sys\nsys.stderr.write('no licence\\n')\nsys.exit(3)\n",
        "crashes": "import os\nos.kill(os.getpid(), 11)\n",
    }
    for name, text in modules.items():
        (tmp_path / f"own_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    return tmp_path


def test_functions_that_load_have_no_problems(own: Path) -> None:
    assert problems(("own_good:score", {"scale": 2.0}), ("regex", {"pattern": "a"})) == []
    assert not any(name.startswith("own_") for name in sys.modules)


def test_each_problem_names_its_field(own: Path) -> None:
    found = problems(
        ("own_broken:score", {}), ("own_good:scores", {}), ("own_good:score", {"scal": 1}), ("regex", {"pattrn": "a"})
    )
    fields = [f"roles.reward.functions.{index}.{name}" for index, name in enumerate(("name", "name", "args", "args"))]
    assert [field for field, _ in found] == fields
    assert "cannot import own_broken: ModuleNotFoundError" in found[0][1]
    assert "module own_good has no 'scores'" in found[1][1]
    assert "unexpected keyword argument 'scal'" in found[2][1]
    assert "argument: 'pattern'" in found[3][1] or "'pattrn'" in found[3][1]


def test_classes_and_functions_of_several_are_told_apart(own: Path) -> None:
    functions = [
        RewardFunctionConfig(name="own_several:Score"),
        RewardFunctionConfig(name="own_several:score", batched=True),
        RewardFunctionConfig(name="own_several:score", args={"scale": 2}, batched=True),
    ]
    found = list(unusable_functions(functions, PATH))
    assert [field for field, _ in found] == ["roles.reward.functions.0.name", "roles.reward.functions.2.args"]
    assert "own_several:Score: is a class; name a function" in found[0][1]
    assert "cannot be called as f(responses, answers, metadata, **args)" in found[1][1]


@pytest.mark.parametrize(("module", "why"), [("leaves", "exit code 3: no licence"), ("crashes", "exit code -11")])
def test_a_module_that_ends_its_process_is_named(own: Path, module: str, why: str) -> None:
    ((field, problem),) = problems(("own_good:score", {}), (f"own_{module}:score", {}), ("own_good:score", {}))
    assert field == "roles.reward.functions.1.name"
    assert problem.startswith(f"own_{module}:score: cannot be loaded: ") and why in problem


def test_a_spec_reports_them_with_what_else_is_missing(own: Path) -> None:
    path = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
    functions = "roles.reward.functions=[{name: own_broken:score}]"
    spec = plan_runs(read_document(path, [functions]))[0].spec
    assert "roles.reward.functions.0.name" in dict(missing(spec))

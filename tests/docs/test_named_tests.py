"""The tests that the documentation names exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def functions(file: Path) -> set[str]:
    """Names of the test functions of a file."""
    nodes = ast.parse(file.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_a_page_names_exists() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    named = {(page.name, *found) for page in pages for found in NAMED.findall(page.read_text())}
    assert len(named) > 20, "the pages name no tests any more"
    missing = [one for one in named if not (ROOT / one[1]).is_file() or one[2] not in functions(ROOT / one[1])]
    assert not missing


def test_the_page_of_the_gpu_check_names_tests_that_it_runs() -> None:
    """Each `-k` of the page selects tests, and each row of its table names some, and no other test exists."""
    page = (ROOT / "docs/guides/gpu-check.md").read_text()
    command = (sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "--collect-only", "-q", "-n", "0")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    expressions = re.findall(r"make gpu-check ARGS=\"-k '(.+?)'\"", page)
    assert len(expressions) > 1
    for expression in expressions:
        for word in expression.split(" or "):
            assert 0 < sum(word in test for test in tests) < len(tests), word
    named: dict[str, list[str]] = {}
    for cell in re.findall(r"^\| (`test_.+?) \|", page, re.MULTILINE):
        file, *rest = re.findall(r"`(.+?)`", cell)
        named.setdefault(file, []).extend(rest)
    for file in {test.split("::")[0] for test in tests}:
        names = named.pop(Path(file).stem)
        own = [test for test in tests if test.startswith(file)]
        assert all(any(name in test for test in own) for name in names), names
        assert not names or all(any(name in test for name in names) for test in own), own
    assert not named

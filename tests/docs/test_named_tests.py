"""The tests that the documentation names exist."""

from __future__ import annotations

import ast
import re
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

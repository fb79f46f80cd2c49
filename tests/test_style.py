"""Every file of the project passes the linter and has the formatter's layout."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["lint", "layout"])
def test_the_tree_is_clean(arguments: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--quiet", str(ROOT)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr

"""The plan that docs/guides/memory.md and the README show is the one that `troupe plan` prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.orchestrator.platforms.kubernetes.manifests import write_model
from troupe.orchestrator.cli import app

MODEL = "/models/qwen2.5-7b-instruct"


def bare(text: str) -> list[str]:
    """Lines with single spaces, and without the empty ones."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_pages_show_the_plan_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "guides" / "memory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(\$ troupe plan deploy/.*?)^```", page, re.DOTALL | re.MULTILINE)
    command, *shown = bare(block)
    write_model(tmp_path / "model", "7b")
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.replace(MODEL, str(tmp_path / "model")))[2:]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 1, "it does not fit"
    printed = bare(result.output)
    assert [line for line in shown if line not in printed] == [], printed[-1]
    (refused,) = (line for line in shown if ": policy-0 needs " in line)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert refused.partition(": ")[2] in readme.splitlines()

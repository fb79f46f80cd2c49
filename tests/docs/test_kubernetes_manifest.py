"""The manifest that docs/explanation/kubernetes-manifest.md explains is the one that `troupe deploy` writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.orchestrator.platforms.kubernetes.manifests import NODE, SIZES, check, write_model
from troupe.orchestrator.cli import app

PAGE = ROOT / "docs" / "explanation" / "kubernetes-manifest.md"


def test_the_page_shows_the_whole_manifest_as_the_code_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (command,) = (line for line in text.splitlines() if line.startswith("$ troupe deploy "))
    write_model(tmp_path / "models" / "policy-7b-instruct", "7b")
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / word) if word.startswith("deploy/") else word for word in shlex.split(command)[2:]]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.output) == (0, "wrote manifest.yaml\n")
    config, job = Path("manifest.yaml").read_text().split("\n---\n")
    assert yaml.safe_load(config)["kind"] == "ConfigMap"
    shown = "".join(re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert shown == job, f"run: {command.removeprefix('$ ')} and show it in {PAGE.name}"
    check(yaml.safe_load(shown))
    assert "of Qwen2.5-7B's size" in text and "7b" in SIZES and NODE.name in command

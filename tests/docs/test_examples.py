"""The specs on the pages: a whole one is valid, and a part of one names fields that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.rollout import RolloutSpec

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SECTIONS = {*RolloutSpec.model_fields, "stages"}


def specs() -> list[Any]:
    """Every YAML block that is a spec or a part of one, with its page."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks, start=1):
            keys = set(re.findall(r"^([a-z_]+):", block, re.MULTILINE))
            if keys and keys <= SECTIONS:
                found.append(pytest.param(block, id=f"{page.relative_to(ROOT)}:{number}"))
    return found


def errors(tmp_path: Path, text: str) -> list[str]:
    """What a spec is refused for, files that are not there aside."""
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    try:
        plan_runs(read_document(path, []))
    except SpecError as error:
        return str(error).splitlines()
    return []


def merged(under: Any, over: Any) -> Any:
    """One document over another, section by section; a source of another kind replaces the whole source."""
    if isinstance(under, dict) and isinstance(over, dict) and "kind" not in over:
        return under | {key: merged(under.get(key), value) for key, value in over.items()}
    return over


@pytest.mark.parametrize("block", specs())
def test_an_example_is_valid(block: str, tmp_path: Path) -> None:
    if block.startswith("name:"):
        assert errors(tmp_path, block) == []
        return
    base = yaml.safe_load((ROOT / "deploy" / "specs" / "tiny-grpo.yaml").read_text())
    found = errors(tmp_path, yaml.safe_dump(merged(base, yaml.safe_load(block))))
    # A part alone may lack what it needs; a field that does not exist, or has another type, is wrong anywhere.
    assert [error for error in found if re.search(r"unknown field|: expected |takes at most", error)] == []


def test_there_are_examples() -> None:
    assert len(specs()) > 8

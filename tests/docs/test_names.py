"""Names in the text of the pages: fields of a spec, metrics and options of commands exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import typer.main

from docs.tooling.hooks import outside_code
from tests.conftest import ROOT
from troupe.orchestrator.cli import app
from troupe.orchestrator.roles.table import TRAINED
from troupe.orchestrator.spec.errors import known_paths
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.metrics import metric_named, metric_sections

OTHERS = {ROOT / "docs" / "guides" / "migration.md", ROOT / "docs" / "project" / "upgrade.md", ROOT / "CHANGELOG.md"}
"""Pages with names of other frameworks, and of earlier versions."""
GENERATED = set((ROOT / "docs" / "reference").glob("*.md")) - {ROOT / "docs" / "reference" / "glossary.md"}
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - OTHERS - GENERATED)
CODE = re.compile(r"`([^`\n]+)`")
FIELD = re.compile(r"([a-z]+(?:\.[A-Za-z_0-9*]+)+)(?=[:= ]|$)")
METRIC = re.compile(r"[a-z]+(?:/[A-Za-z_@0-9]+)+")
FILES = (".json", ".md", ".py", ".yaml")
FIELDS = {*known_paths(RolloutSpec), *known_paths(OfflineSpec)}
FAMILIES = {
    family
    for rows in metric_sections().values()
    for row in rows
    for family in (TRAINED if row.name.startswith("TRAINER/") else [row.name.partition("/")[0]])
    if "/" in row.name
}
"""First words of metrics."""


def named() -> Iterator[tuple[str, str]]:
    """(page, code) of everything that the text of a page shows as code."""
    for page in PAGES:
        found: list[str] = []

        def collect(line: str, found: list[str] = found) -> str:
            found += CODE.findall(line)
            return line

        outside_code(page.read_text(encoding="utf-8"), collect)
        yield from ((str(page.relative_to(ROOT)), code) for code in found)


def is_field(name: str) -> bool:
    """Whether a dotted name is that of a field; capitals and `*` stand for any name, digits for a place in a list."""
    pattern = re.sub(r"\.\d+(?=\.|$)", "", name)
    pattern = re.sub(r"\.NAME(?=\.|$)", "", pattern)  # of a section in a map
    pattern = re.sub(r"\b[A-Z]+\b", "*", pattern)
    return any(fnmatchcase(field, pattern) for field in FIELDS)


def is_metric(name: str) -> bool:
    """Whether a metric, or the pattern of one, is in the reference."""
    known = {row.name for rows in metric_sections().values() for row in rows}
    example = re.sub(r"\b[A-Z]{2,}\b", "x", name).replace("@K", "@2")
    return name in known or metric_named(example) is not None


def test_fields_exist() -> None:
    sections = {*RolloutSpec.model_fields, *OfflineSpec.model_fields}
    found = [(page, match[1]) for page, code in named() if (match := FIELD.match(code))]
    found = [(page, name) for page, name in found if name.partition(".")[0] in sections and not name.endswith(FILES)]
    assert len(found) > 150
    assert [(page, name) for page, name in found if not is_field(name)] == []


def test_metrics_exist() -> None:
    found = [(page, code) for page, code in named() if METRIC.fullmatch(code)]
    found = [(page, code) for page, code in found if code.partition("/")[0] in FAMILIES]
    # `policy/NAME` is a metric of a user's own algorithm, and a module of `workers/` is named with its file's ending.
    found = [(page, code) for page, code in found if code != "policy/NAME"]
    assert len(found) > 40
    assert [(page, code) for page, code in found if not is_metric(code)] == []


def test_commands_in_the_text_have_their_options() -> None:
    group: Any = typer.main.get_command(app)
    wrong: list[tuple[str, str]] = []
    count = 0
    for page, code in named():
        if (match := re.match(r"troupe ([a-z]+)", code)) is None:
            continue
        count += 1
        command = group.commands.get(match[1])
        known = set() if command is None else {name for parameter in command.params for name in parameter.opts}
        if command is None or not set(re.findall(r"(?<!\S)--[a-z-]+", code)) <= known | {"--help"}:
            wrong.append((page, code))
    assert count > 100
    assert wrong == []


def test_the_readme_links_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [
        path for folder in ("guides", "reference", "explanation") for path in (ROOT / "docs" / folder).glob("*.md")
    ]
    linked = set(re.findall(r"\]\((docs/[\w/-]+\.md)", text))
    mirrored = {"docs/explanation/architecture.md"}  # ARCHITECTURE.md
    assert {str(Path(page).relative_to(ROOT)) for page in pages} - mirrored - linked == set()

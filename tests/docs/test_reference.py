"""The generated pages are those that the code of today makes."""

from __future__ import annotations

import pytest

from docs.tooling.cli_reference import cli_reference
from docs.tooling.write_reference import FOLDER, PAGES
from troupe.orchestrator.cli import COMMANDS


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run: python -m docs.tooling.write_reference"


def test_every_page_of_the_reference_is_generated_but_the_glossary_and_the_one_with_measured_seconds() -> None:
    generated = {name for name in PAGES if name.startswith("reference/")}
    other = {"reference/glossary.md", "reference/answers.md"}
    assert {f"reference/{path.name}" for path in FOLDER.glob("reference/*.md")} == generated | other


def test_every_command_has_a_section_and_every_option_a_row() -> None:
    text = cli_reference()
    for name in COMMANDS:
        assert f"\n## troupe {name}\n" in text
    for option in ("--set FIELD=VALUE", "--cpus-per-node INTEGER", "--output, -o PATH", "--dry-run", "JOB"):
        assert f"`{option}`" in text
    assert "| `--timeout-s NUMBER` | `600` |" in text

"""The diffs of the page on extending apply to the tree, and the commands beside them do what the page says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "guides" / "extending.md"
COPIED = (
    "troupe",
    "orchestrator",
    "workers",
    "tests",
    "deploy",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "mkdocs.yml",
)
MODEL = Path(".cache") / "models" / "tiny-llama"
"""The model folder that specs of the page name."""


def sections() -> dict[str, str]:
    """The sections of the page that have a diff, by title."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {title: text for title, text in zip(parts[::2], parts[1::2], strict=True) if "```diff" in text}


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines of output that the page shows) of a section."""
    listed: list[tuple[str, list[str]]] = []
    for block in blocks(text, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                listed.append((line.removeprefix("$ "), []))
            else:
                listed[-1][1].append(line)
    return listed


def found(line: str, shown: list[str]) -> bool:
    """Whether a command printed a line of the page; `...` at its end stands for anything."""
    start = line.removesuffix("...")
    return any(one.startswith(start) if start != line else one == line for one in shown)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree, with the model."""
    target = tmp_path / "tree"
    target.mkdir()
    ignore = shutil.ignore_patterns("results")  # compiled modules stay valid: a copy has the times of its files
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target / name)
    (target / MODEL).parent.mkdir(parents=True)
    (target / MODEL).symlink_to((ROOT / MODEL).resolve())
    return target


def run(tree: Path, command: list[str], given: str = "") -> str:
    """What a command prints in the copy; it must succeed."""
    # GIT_CEILING_DIRECTORIES: the copy is no repository, and none above it is meant.
    environment = {**os.environ, "PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=environment, input=given, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_page_has_walkthroughs_with_diffs_and_commands() -> None:
    all_of_them = sections()
    titles = {"An algorithm", "A reward function", "A metric", "A role", "A weight-transfer back-end"}
    assert titles <= set(all_of_them)
    for title, text in all_of_them.items():
        assert commands(text), title
        assert any("b/tests/" in diff for diff in blocks(text, "diff")), f"{title}: no test"


@pytest.mark.parametrize("title", sections())
def test_a_walkthrough_works(title: str, tree: Path) -> None:
    text = sections()[title]
    for diff in blocks(text, "diff"):
        run(tree, ["git", "apply", "--verbose", "-"], diff)
    for command, wanted in commands(text):
        program, *arguments = shlex.split(command)
        assert program in ("troupe", "python"), command
        start = [sys.executable, "-m", "troupe"] if program == "troupe" else [sys.executable]
        shown = run(tree, [*start, *arguments]).splitlines()
        assert all(found(line, shown) for line in wanted), f"{command}: {shown}"


@pytest.mark.parametrize("title", sections())
def test_the_code_of_a_walkthrough_passes_the_style_checks(title: str, tree: Path) -> None:
    changed: list[str] = []
    for diff in blocks(sections()[title], "diff"):
        run(tree, ["git", "apply", "-"], diff)
        changed += re.findall(r"^\+\+\+ b/(.+\.py)$", diff, re.MULTILINE)
    run(tree, [sys.executable, "-m", "ruff", "check", "--no-cache", *changed])
    run(tree, [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *changed])

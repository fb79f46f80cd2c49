"""The diffs of the page on extending apply to the tree, and the commands beside them do what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
WRITE_REFERENCE = "python -m docs.tooling.write_reference"
PYTEST = "python -m pytest -q -n 0 "
ANSWERS = """
import json, shlex, sys
from tests.forked_commands import run_command
print(json.dumps([vars(run_command(*shlex.split(arguments))) for arguments in sys.argv[1:]]))
"""
ADDED = {
    "An algorithm": "grpo_token",
    "A metric": "response_tokens/std",
    "A role": "observer",
    "A weight-transfer back-end": "disk",
}
"""What the sections add to generated pages."""


@dataclass(frozen=True)
class Extended:
    """A copy of the tree with what all sections of the page add to it."""

    tree: Path
    refused: dict[str, str]
    """Why the diffs of a section do not apply without those of the others, by its title; "" where they do."""
    changed: list[str]
    """Files that the diffs name."""


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


def written(text: str) -> list[str]:
    """Lines about the pages that a section's code changes."""
    return [line for command, lines in commands(text) if command == WRITE_REFERENCE for line in lines]


def every_command(prefix: str) -> list[str]:
    """The commands of all sections that begin with a prefix, each once."""
    listed = [command for text in sections().values() for command, _ in commands(text) if command.startswith(prefix)]
    return list(dict.fromkeys(listed))


def found(line: str, shown: list[str]) -> bool:
    """Whether a command printed a line of the page; `...` at its end stands for anything."""
    start = line.removesuffix("...")
    return any(one.startswith(start) if start != line else one == line for one in shown)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Extended:
    """A copy of the tree, with the model, to which the diffs of all sections are applied."""
    target = tmp_path_factory.mktemp("walkthroughs") / "tree"
    target.mkdir()
    ignore = shutil.ignore_patterns("results")  # compiled modules stay valid: a copy has the times of its files
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target / name)
    (target / MODEL).parent.mkdir(parents=True)
    (target / MODEL).symlink_to((ROOT / MODEL).resolve())
    diffs = {title: blocks(text, "diff") for title, text in sections().items()}
    alone = {title: start(target, ["git", "apply", "--check", "-"], "".join(each)) for title, each in diffs.items()}
    changed: list[str] = []
    for diff in (diff for each in diffs.values() for diff in each):
        run(target, ["git", "apply", "-"], diff)
        changed += re.findall(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)
    return Extended(target, {title: done.stderr for title, done in alone.items()}, sorted(set(changed)))


def start(tree: Path, command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in the copy."""
    # GIT_CEILING_DIRECTORIES: the copy is no repository, and none above it is meant.
    environment = {**os.environ, "PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    return subprocess.run(command, cwd=tree, env=environment, input=given, capture_output=True, text=True)


def run(tree: Path, command: list[str], given: str = "") -> str:
    """What a command prints in the copy; it must succeed."""
    done = start(tree, command, given)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def printed(tree: Path, command: str) -> list[str]:
    """Lines that a command of the page prints; it must succeed."""
    program, *arguments = shlex.split(command)
    assert program == "python", command
    return run(tree, [sys.executable, *arguments]).splitlines()


def test_the_page_has_walkthroughs_with_diffs_and_commands() -> None:
    all_of_them = sections()
    titles = {"An algorithm", "A reward function", "A metric", "A role", "A weight-transfer back-end"}
    assert titles <= set(all_of_them)
    for title, text in all_of_them.items():
        assert commands(text), title
        assert any("b/tests/" in diff for diff in blocks(text, "diff")), f"{title}: no test"


@pytest.mark.parametrize("title", sections())
def test_a_walkthrough_applies_without_the_others(title: str, extended: Extended) -> None:
    assert extended.refused[title] == ""


@pytest.mark.long
def test_the_reference_has_what_every_walkthrough_adds(extended: Extended) -> None:
    """One call writes all pages; the lines that are new in a page name what each of its sections adds."""
    wanted = {title: lines for title, text in sections().items() for lines in [written(text)] if lines}
    shown = printed(extended.tree, WRITE_REFERENCE)
    assert wanted.keys() == ADDED.keys()
    for title, lines in wanted.items():
        assert set(lines) <= set(shown), f"{title}: {shown}"
        for page in (line.removeprefix("wrote ") for line in lines):
            before, now = ((root / page).read_text(encoding="utf-8").splitlines() for root in (ROOT, extended.tree))
            assert any(ADDED[title] in line for line in set(now) - set(before)), f"{title}: {page}"


@pytest.mark.long
def test_the_tests_of_the_walkthroughs_pass(extended: Extended) -> None:
    """The files of all sections in one call, and what a section selects with -k in another."""
    paths: list[str] = []
    for command in every_command(PYTEST):
        if " -k " in command:
            printed(extended.tree, command)
        else:
            paths += shlex.split(command.removeprefix(PYTEST))
    assert len(paths) > len(sections())
    printed(extended.tree, PYTEST + shlex.join(paths))


@pytest.fixture(scope="module")
def answers(extended: Extended) -> dict[str, Any]:
    """What every `troupe` command of the page returns in the copy, as a `Finished`; one import serves all."""
    listed = every_command("troupe ")
    script = [sys.executable, "-c", ANSWERS, *(command.removeprefix("troupe ") for command in listed)]
    return dict(zip(listed, json.loads(run(extended.tree, script)), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("command", every_command("troupe "))
def test_a_command_of_a_walkthrough_prints_what_the_page_shows(command: str, answers: dict[str, Any]) -> None:
    wanted = [line for text in sections().values() for one, lines in commands(text) if one == command for line in lines]
    answer = answers[command]
    assert answer["returncode"] == 0, answer
    assert all(found(line, answer["stdout"].splitlines()) for line in wanted), answer


def test_every_command_is_one_that_these_tests_run() -> None:
    for text in sections().values():
        for command, _ in commands(text):
            assert command == WRITE_REFERENCE or command.startswith((PYTEST, "troupe ")), command


def test_the_code_of_the_walkthroughs_passes_the_style_checks(extended: Extended) -> None:
    changed = [path for path in extended.changed if path.endswith(".py")]
    run(extended.tree, [sys.executable, "-m", "ruff", "check", "--no-cache", *changed])
    run(extended.tree, [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *changed])

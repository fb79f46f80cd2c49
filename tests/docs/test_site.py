"""The documentation site: it builds strictly, every link in it leads somewhere, and it needs no other server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer.main
from click import ClickException

from docs.tooling.hooks import outside_code, resolved
from tests.conftest import ROOT
from troupe.orchestrator.cli import app

PAGES = (*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")))
"""The Markdown sources: pages of the site, and the files that GitHub shows."""
NAMED = {str(path.relative_to(ROOT)): path for path in PAGES}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
OURS = re.compile(r"(?:orchestrator|workers|benchmarks|deploy|docs|tests)/[\w./*-]*")
NO_FILES = ("benchmarks/results/", "workers/rollout")
"""A folder that a command writes and the repository does not hold, and a metric that looks like a path."""


@dataclass
class Document(HTMLParser):
    """What a built page links to and what can be linked to in it."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    """Scripts, styles, images and fonts that a browser fetches with the page."""
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}


def read(path: Path) -> Document:
    """A built page."""
    document = Document()
    document.feed(path.read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning is an error."""
    target = tmp_path_factory.mktemp("docs") / "site"
    # Not --quiet: it drops warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_link_and_anchor_inside_the_site_leads_somewhere(site: Path) -> None:
    documents = {path: read(path) for path in site.rglob("*.html")}
    assert len(documents) > 20
    broken: list[str] = []
    for path, document in documents.items():
        for link in (*document.links, *document.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            # The page for addresses that do not exist is shown anywhere, so its links start at the site's root.
            start = site if path.name == "404.html" else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}: no such file")
            elif parts.fragment and target in documents and parts.fragment not in documents[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert not broken, "\n".join(broken)


def test_external_links_are_whole_and_encrypted(site: Path) -> None:
    for path in site.rglob("*.html"):
        for link in read(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme == "https", f"{path.name}: {link}"
                assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), f"{path.name}: {link}"


def test_the_site_loads_nothing_from_another_server(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [load for load in read(path).loads if urlsplit(load).netloc] == [], path.name
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8"), "diagrams would load a script from a CDN"
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:@import\s+|url\()[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name


def test_the_generators_and_hooks_are_no_part_of_the_site(site: Path) -> None:
    assert list(site.rglob("*.py")) == []
    assert not (site / "tooling").exists()


def test_a_page_that_mirrors_a_file_of_the_root_shows_it(site: Path) -> None:
    page = (site / "explanation" / "architecture.html").read_text(encoding="utf-8")
    assert "RolloutScheduler" in page
    assert "../../ARCHITECTURE.md" not in page


@pytest.mark.parametrize("name", NAMED)
def test_links_of_a_source_lead_to_files_of_the_repository(name: str) -> None:
    missing: list[str] = []

    def check(line: str) -> str:
        for target in LINK.findall(line):
            path = urlsplit(target).path
            if not urlsplit(target).scheme and path and not (ROOT / resolved(path, name)).exists():
                missing.append(target)
        return line

    outside_code(NAMED[name].read_text(encoding="utf-8"), check)
    assert not missing


@pytest.mark.parametrize("name", NAMED)
def test_paths_that_a_source_names_exist(name: str) -> None:
    missing: list[str] = []
    for code in CODE.findall(NAMED[name].read_text(encoding="utf-8")):
        for path in OURS.findall(code):
            placeholder = re.search(r"[A-Z]{3}", path) and not (ROOT / path).exists()
            if placeholder or path in NO_FILES or not path.strip("./*"):
                continue
            found = any(ROOT.glob(path.rstrip("/."))) if "*" in path else (ROOT / path.rstrip(".")).exists()
            if not found:
                missing.append(path)
    assert not missing


# Commands


def shell_lines(text: str) -> Iterator[str]:
    """Command lines of the fenced blocks of a page, with continued lines joined and comments cut."""
    for block in re.findall(r"^```(?:bash|console|)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield line.strip().removeprefix("$ ").split("  #")[0].strip()


def commands(program: str) -> list[tuple[str, str]]:
    """(page, command line) of every line that starts with the program."""
    lines = ((name, line) for name, path in NAMED.items() for line in shell_lines(path.read_text(encoding="utf-8")))
    return sorted({(name, line) for name, line in lines if line.startswith(f"{program} ")})


def test_there_are_commands_to_check() -> None:
    assert len(commands("troupe")) > 30
    assert len(commands("make")) > 5
    assert len(commands("python")) > 10


@pytest.mark.parametrize(("page", "line"), commands("troupe"))
def test_troupe_commands_parse(page: str, line: str) -> None:
    group: Any = typer.main.get_command(app)
    if page == "docs/reference/cli.md" or line.startswith("troupe COMMAND"):
        return
    _, name, *words = shlex.split(re.split(r"\s{2,}", line)[0])  # without what the console says about a command
    words = words[: words.index(">")] if ">" in words else words
    assert name in group.commands, f"{page}: {line}"
    try:
        group.commands[name].make_context(name, [*words])
    except ClickException as error:
        pytest.fail(f"{page}: {line}: {error.format_message()}")
    for word in words:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists(), f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), commands("make"))
def test_make_targets_exist(page: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in shlex.split(line, comments=True)[1:] if "=" not in word} <= targets, f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), commands("python"))
def test_python_commands_name_files_and_modules_that_exist(page: str, line: str) -> None:
    words = shlex.split(line)
    named = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
    assert named.isupper() or "NAME" in named or named == "pytest.py" or (ROOT / named).exists(), f"{page}: {line}"

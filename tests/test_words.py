"""The words of code, messages and documentation: no phrase that has a usual shorter one, no name of two classes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PLACES = ("orchestrator", "workers", "deploy", "docs", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
READ = {".py", ".md", ".yaml", ".js", ".css", ".ipynb", ".j2"}
BETTER = {
    r": there is none\b": "say what None, or an empty value, means",
    r"of (its|their|one's|the user's) own\b": "separate",
    r"in the place of\b": "instead of",
    r"\bin words[.,;:]": "as text",
    r"\bby itself\b": "automatically, alone",
    r"goes on\b": "continues",
    r"go on from\b": "resume from",
    r"trains on (from|meanwhile)\b": "continues",
    r"(is|was|are) told\b(?! apart)": "receives, is called with",
    r"takes? part\b": "participates",
    r"asks? (for )?no network\b": "makes no network requests",
    r"bounds? it\b": "is the bottleneck; apply",
    r"once more\b": "again",
    r"of now\b": "current",
    r"untried\b": "untested",
    r"laid anew\b": "resharded",
    r"condemn|last_words|whereabouts|culprit|lifeline|glance": "the new name",
}
"""Patterns in lower case, and what to write instead."""


def phrases(text: str) -> Iterator[tuple[int, str]]:
    """(line, phrase with its replacement) of the phrases in a text."""
    text = text.lower()
    for pattern, better in BETTER.items():
        for match in re.finditer(pattern, text):
            yield text.count("\n", 0, match.start()) + 1, f"{match[0]!r} (better: {better})"


def files(*suffixes: str) -> list[Path]:
    """Files of the product and its documentation, without generated pages."""
    places = [ROOT / name for name in PLACES]
    found = {file for place in places for file in ([place] if place.is_file() else place.rglob("*"))}
    found -= {page for page in (ROOT / "docs" / "reference").glob("*.md") if page.stem != "glossary"}
    return sorted(file for file in found if file.suffix in suffixes and "results" not in file.parts)


def test_no_phrase_has_a_shorter_usual_one() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {phrase}"
        for file in files(*READ)
        for line, phrase in phrases(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_the_phrases_are_found_where_they_stand() -> None:
    for line in ("None: there is none.", "in a process of its own", "vLLM resumes by itself", "the trainer bounds it"):
        assert list(phrases(line)), line
    for line in ("empty if there is none", "for word in words", "causes are told apart", "it trains on rollouts"):
        assert not list(phrases(line)), line


def test_no_two_classes_have_the_same_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in files(".py"):
        if file.relative_to(ROOT).parts[0] == "docs":
            continue
        for name in re.findall(r"^ *class (\w+)[:(\[]", file.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(str(file.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}

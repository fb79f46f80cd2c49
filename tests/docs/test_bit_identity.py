"""Bit identity of what is repeated is a property of the CPU: every page and docstring that promises it says so."""

from __future__ import annotations

import re

from tests.conftest import ROOT

FOLDERS = ("docs", "orchestrator", "workers")
IDENTICAL = re.compile(r"bit for bit|bitwise (?:resume|on)|resume is bitwise|that were lost:|lost ones:")
REPEATED = re.compile(r"resum|replay|recover|restart|interrupt|without faults", re.IGNORECASE)
"""Words for updates that are computed again."""


def paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n|\n(?=\s*(?:[-|*]|\d+\.) )", text)


def unqualified(text: str) -> list[str]:
    """Paragraphs that promise bit identity of repeated updates without the word CPU."""
    promises = (part for part in paragraphs(text) if IDENTICAL.search(part) and REPEATED.search(part))
    return [part.strip() for part in promises if "CPU" not in part]


def test_who_promises_bit_identity_names_the_cpu() -> None:
    files = [file for folder in FOLDERS for end in ("md", "py") for file in sorted((ROOT / folder).rglob(f"*.{end}"))]
    found = {str(file.relative_to(ROOT)): unqualified(file.read_text()) for file in (ROOT / "README.md", *files)}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_a_promise_without_the_word_is_found() -> None:
    assert unqualified("a\n\n- A resumed run is equal\n  bit for bit.\n- b") == [
        "- A resumed run is equal\n  bit for bit."
    ]
    assert unqualified("Resumes bit for bit on the CPU.") == unqualified("Restored bit for bit.") == []

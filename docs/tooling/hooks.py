"""MkDocs hooks: pages that mirror a file of the repository root, and links that leave the folder `docs/`.

A page whose only content is a link to a Markdown file of the repository root, such as
`[ARCHITECTURE.md](../../ARCHITECTURE.md)`, shows that file. Links in it are rewritten to start at the page. A link to
a file that is no page of the site becomes plain text: the repository has it, the site does not.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_MIRROR = re.compile(r"\[[^\]]+\]\(([^)\s]+\.md)\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The Markdown of a page, with mirrored text and with links that the site can follow."""
    root = Path(config.docs_dir).parent
    here = posixpath.join(Path(config.docs_dir).name, page.file.src_uri)
    mirrors = mirrored_files(root, Path(config.docs_dir))
    source = here
    if (match := _MIRROR.fullmatch(markdown.strip())) is not None:
        source = resolved(match.group(1), here)
        markdown = (root / source).read_text(encoding="utf-8")
    pages = {posixpath.join(Path(config.docs_dir).name, name) for name in files.src_uris}

    def rewritten(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.startswith(("#", "mailto:")) or "://" in target:
            return match.group(0)
        path, mark, anchor = target.partition("#")
        path = resolved(path, source)
        path = mirrors.get(path, path)
        if path not in pages:
            return text
        return f"[{text}]({posixpath.relpath(path, posixpath.dirname(here))}{mark}{anchor})"

    return outside_code(markdown, lambda line: _LINK.sub(rewritten, line))


def mirrored_files(root: Path, docs: Path) -> dict[str, str]:
    """Files of the repository root that a page mirrors, each with the page's path from the root."""
    found: dict[str, str] = {}
    for path in docs.rglob("*.md"):
        here = path.relative_to(root).as_posix()
        if (match := _MIRROR.fullmatch(path.read_text(encoding="utf-8").strip())) is not None:
            found[resolved(match.group(1), here)] = here
    return found


def resolved(target: str, source: str) -> str:
    """The path from the repository root that a relative link of the file `source` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """The text with `change` applied to every line that is not inside a fenced code block."""
    lines: list[str] = []
    fence = ""
    for line in markdown.split("\n"):
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and (not fence or mark == fence):
            fence = "" if fence else mark
            lines.append(line)
        else:
            lines.append(line if fence else change(line))
    return "\n".join(lines)

"""Text from user code or a model, made fit for one line of a log, a console or a checkpoint."""

from __future__ import annotations

import re

LONGEST = 300
"""Characters."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Terminal escape sequences (ECMA-48): control sequences such as colours, operating system commands, two characters."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """The text without escape sequences and control characters, with single spaces, cut to `longest` characters."""
    visible = "".join(char if char.isprintable() else " " for char in _ESCAPES.sub("", text[: 16 * longest]))
    line = " ".join(visible.split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."

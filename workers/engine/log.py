"""The log of an engine's processes: where it is, and the last error in it.

vLLM tells its client only that the engine has died; what killed it stands in the log.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$")
"""The last line of a traceback, behind whatever the logger puts before it."""
_CONSEQUENCES = ("EngineDeadError", "EngineGenerateError", "Engine core initialization failed", "; its log: ")
"""Errors that only say that there was another one."""
_LONGEST = 300


def own_logs() -> list[Path]:
    """The files that this process and those it starts write to: its standard output (vLLM's log) and error."""
    paths = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def last_error(log: Path) -> str:
    """The last error of a log that is not the consequence of another one; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = (match[1] for line in reversed(lines) if (match := _ERROR.search(line)))
    return next((error for error in found if not any(words in error for words in _CONSEQUENCES)), "")[:_LONGEST]

"""How a process ended: its signal or exit code as text, and what the end of its log says."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

_TAIL_BYTES = 1 << 16
_ERROR = re.compile(
    r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$"
    r"|^(?:.*[\])] )?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))$"
    r"|(Worker proc \S+ died unexpectedly \(exit code: -?\d+\))"
    r"|^((?:CUDA|NCCL) error\b.*|Fatal Python error: .*|terminate called .*)$"
)
"""The last line of a traceback, behind whatever the logger puts before it, an engine's word about one of its ranks, or
what C++ and Python print before they end a process."""
_CONSEQUENCES = ("EngineDeadError", "EngineGenerateError", "Engine core initialization failed", "; its log: ")
_CONSEQUENCES += ("RuntimeError: Executor failed.",)
"""Errors that only refer to another one."""
_ABORTED = "Fatal Python error: Aborted"
"""Printed behind the reason, which C and C++ print in any form."""
_EXIT_CODE = re.compile(r"exit code: (-?\d+)")
_NOT_TEXT = re.compile(
    r":(?:job_id|actor_name|task_name):|\[.* logging\.cc:\d+: |\*\*\* SIG\w+ received |(?:PC: )?@ +0x"
)
"""Beginnings of lines that Ray writes to a worker's log: marks, and its own stack of a signal."""
_LAST_LINES = 3
_LONGEST = 300


def ended_by(code: int) -> str:
    """How a process with this exit code ended, such as `SIGKILL` (a signal is negative) or `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def own_logs() -> list[Path]:
    """The files that this process and its children write to: its standard output (vLLM's log) and error."""
    return [path for path in dict.fromkeys(map(log_of, (1, 2))) if path is not None]


def log_of(descriptor: int) -> Path | None:
    """The file that a descriptor of this process refers to, or None if it is something else."""
    with suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return path if path.is_file() else None
    return None


def last_error(log: Path) -> str:
    """The last error of a log that is not the consequence of another one; empty if there is none."""
    lines = _lines(log)
    for number in reversed(range(len(lines))):
        match = _ERROR.search(lines[number])
        if match is None or any(words in lines[number] for words in _CONSEQUENCES):
            continue
        found = next(filter(None, match.groups()))
        if found == _ABORTED and number and (reason := lines[number - 1]):
            found = f"{reason} ({_ABORTED})"
        return _EXIT_CODE.sub(lambda code: ended_by(int(code[1])), found)[:_LONGEST]
    return ""


def last_lines(log: Path) -> str:
    """The last lines of a log, or empty if there are none."""
    return " | ".join(_lines(log)[-_LAST_LINES:])[-_LONGEST:]


def end_of_log(log: Path) -> str:
    """The last error of a log, or its last lines if there is none."""
    return last_error(log) or last_lines(log)


def _lines(log: Path) -> list[str]:
    """The printable text of the last lines of a log, without empty ones; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = ("".join(filter(str.isprintable, line)).strip() for line in text.splitlines())
    return [line for line in lines if line and not _NOT_TEXT.match(line)]

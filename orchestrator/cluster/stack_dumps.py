"""Requests the stacks of processes of this node, and reads them (`workers/telemetry/stacks.py`)."""

from __future__ import annotations

import json
import linecache
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from troupe.workers.telemetry.stacks import LARGEST, SIGNAL, stack_file

Origin = Literal["user", "troupe", "library"]
_PACKAGE = f"{Path(__file__).absolute().parents[2]}/"
"""The folder `troupe`, as in the paths of its frames."""
_LIBRARIES = tuple(
    {f"{path}/" for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)
_READ = 2**17
"""Longest part of a file that is read, in bytes."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+")
_LONGEST_SOURCE = 120
_LOOKS, _BETWEEN_S = 5, 0.01
"""Number of looks at a process, and seconds between them: most that run at one moment only answer something."""
_SPY_S = 1.0
"""Longest wait for py-spy, which takes a tenth of it."""


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str
    source: str = ""
    """The line of code, if the file can be read."""

    @property
    def origin(self) -> Origin:
        """Whose code it is."""
        if self.file.startswith(_PACKAGE):
            return "troupe"
        is_library = self.file.startswith(("<", *_LIBRARIES)) or "site-packages/" in self.file
        return "library" if is_library else "user"

    def __str__(self) -> str:
        where = f"{self.function} ({self.file}:{self.line})"
        return f"{where}: {self.source}" if self.source else where


@dataclass(frozen=True)
class Thread:
    """The stack of one thread."""

    frames: tuple[Frame, ...]
    """Innermost first."""

    def innermost(self, origin: Origin) -> Frame | None:
        return next((frame for frame in self.frames if frame.origin == origin), None)


def request_stacks(folder: Path, pids: Iterable[int]) -> dict[int, int]:
    """Asks processes for their stacks; returns the length of each one's file before. Only processes with the handler
    are signalled: SIGUSR1 ends every other. It walks the frames of all threads and can crash if another thread
    changes them: a process that is stopped, or whose threads compute, is left out (`read_from_outside`)."""
    asked: dict[int, int] = {}
    for pid in pids:
        path = stack_file(folder, pid)
        try:
            if not _handles(pid) or not _keeps_its_frames(pid):
                continue
            before = path.stat().st_size
            if before > LARGEST:
                os.truncate(path, 0)
                before = 0
            os.kill(pid, SIGNAL)
        except (OSError, ValueError):
            continue
        asked[pid] = before
    return asked


def read_stacks(folder: Path, asked: dict[int, int], deadline: float) -> dict[int, tuple[Thread, ...]]:
    """The stacks that were written since `request_stacks`, until `deadline` (of `time.monotonic`)."""
    found: dict[int, tuple[Thread, ...]] = {}
    sizes = dict(asked)
    while True:
        late = time.monotonic() > deadline
        for pid in [pid for pid in asked if pid not in found]:
            size = _size(stack_file(folder, pid))
            if size > asked[pid] and (late or size == sizes[pid]):  # no longer growing
                found[pid] = _read(stack_file(folder, pid), asked[pid])
            sizes[pid] = size
        if late or len(found) == len(asked):
            return found
        time.sleep(0.05)


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """The threads in a text of Python's `faulthandler`; the last one is the main thread."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.fullmatch(line)):
            number = int(match["line"]) if match["line"].isdecimal() else 0
            threads[-1].append(_frame(match["file"], number, match["function"]))
    return tuple(Thread(tuple(frames)) for frames in threads if frames)


def thread_at(frame: FrameType | None) -> Thread:
    """The stack of a thread of this process, from its innermost frame."""
    frames = []
    while frame is not None:
        frames.append(_frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return Thread(tuple(frames))


def read_from_outside(pid: int) -> tuple[Thread, ...]:
    """The stacks of a process that does not write them, from its memory if py-spy may read it."""
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.is_file():
        return ()
    command = [str(spy), "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, env=os.environ.copy(), capture_output=True, timeout=_SPY_S, check=True)
        threads = sorted(json.loads(done.stdout), key=lambda thread: thread["os_thread_id"] == pid)
        return tuple(
            Thread(tuple(_frame(f["filename"], int(f["line"]), f["name"]) for f in thread["frames"]))
            for thread in threads
            if thread["frames"]
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return ()


def _frame(file: str, line: int, function: str) -> Frame:
    source = " ".join(linecache.getline(file, line).split())[:_LONGEST_SOURCE] if line else ""
    return Frame(file, line, function, source)


def _handles(pid: int) -> bool:
    """Whether a process has a handler for the signal and does not block it."""
    status = _status(f"/proc/{pid}")
    bit = 1 << (SIGNAL - 1)
    return bool(int(status["SigCgt"], 16) & bit) and not int(status["SigBlk"], 16) & bit


def _keeps_its_frames(pid: int) -> bool:
    """Whether a process soon has a single thread, or none that runs, and no stopped one."""
    for _ in range(_LOOKS):
        before, after = _threads(pid), _threads(pid)
        states = {state for state, _ in after.values()}
        if "T" in states:
            return False
        if len(after) == 1 or ("R" not in states and before == after):
            return True
        time.sleep(_BETWEEN_S)
    return False


def _threads(pid: int) -> dict[str, tuple[str, str]]:
    """State of each thread of a process, and how often it has gone to sleep. Of two that hand the interpreter lock
    to each other both can be seen asleep; with equal counts in two readings, both slept at one moment."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        status = _status(f"/proc/{pid}/task/{thread}")
        found[thread] = (status["State"][:1], status["voluntary_ctxt_switches"])
    return found


def _status(folder: str) -> dict[str, str]:
    """Fields of the status of a process or thread in `/proc`."""
    text = Path(folder, "status").read_bytes().decode(errors="replace")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> tuple[Thread, ...]:
    linecache.checkcache()
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            return parse_stacks(stream.read(_READ).decode(errors="replace"))
    except OSError:
        return ()

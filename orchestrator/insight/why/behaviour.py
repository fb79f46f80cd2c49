"""What one process does, from its state, its CPU time and its stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from troupe.orchestrator.cluster.inspection import ProcessFacts
from troupe.orchestrator.cluster.stack_dumps import Frame, Thread

Kind = Literal["gone", "stopped", "disk", "collective", "lock", "sleep", "busy", "waits"]
BUSY = 0.4
"""A process computes if it uses at least this many CPU seconds per second."""
_STARVED = 0.05
"""The same for a process that could run at the moment of the look: others use the cores."""
_COLLECTIVE_FILES = ("distributed_c10d.py", "deepspeed/comm/")
_LOCK_SOURCE = (".acquire(", "lock", "mutex", ".join(", "condition")
_SHOWN_FRAMES = 6


@dataclass(frozen=True)
class Behaviour:
    """What a process does."""

    process: ProcessFacts
    kind: Kind
    doing: str
    """End of a sentence that begins with the process."""
    frame: Frame | None = None
    """Where, in the code that matters most: the user's before Troupe's before a library's."""

    @property
    def in_user_code(self) -> bool:
        """Whether it is in the user's own code."""
        return self.frame is not None and self.frame.origin == "user"


def behaviour_of(process: ProcessFacts) -> Behaviour:
    """What a process does."""
    thread = telling_thread(process)
    frame = None if thread is None else _telling_frame(thread)
    kind, doing = _kind(process, thread, frame)
    return Behaviour(process, kind, doing, frame)


def telling_thread(process: ProcessFacts) -> Thread | None:
    """The thread that says most: one in the user's code, else the main thread."""
    in_user_code = [thread for thread in process.threads if thread.innermost("user") is not None]
    main = process.threads[-1:]
    return next((thread for thread in (*reversed(in_user_code), *main)), None)


def stack_lines(process: ProcessFacts) -> list[str]:
    """The innermost frames of the threads in user code, or of the main thread."""
    telling = telling_thread(process)
    if telling is None:
        return [f"stack of process {process.pid}: none was written"] if process.state else []
    shown = [thread for thread in process.threads if thread.innermost("user") is not None] or [telling]
    lines = []
    for thread in shown[:2]:
        lines.append(f"stack of {process.worker}, process {process.pid} (innermost first):")
        lines += [f"  {frame}" for frame in _worth_showing(thread)]
    return lines


def process_line(process: ProcessFacts) -> str:
    """Process, state, CPU time and memory in one line."""
    words = [f"{process.worker}: process {process.pid}", f"state {process.state or 'gone'}"]
    words.append(f"{process.cpu:.2f} CPU seconds in the last second, {process.resident >> 20} MiB")
    if process.waits_in:
        words.append(f"in {process.waits_in}")
    if process.waits_for_device and process.state != "D":
        words.append("a thread in state D")
    return f"{', '.join(words)}  [{process.title}]"


def _kind(process: ProcessFacts, thread: Thread | None, frame: Frame | None) -> tuple[Kind, str]:
    at = f" in {frame}" if frame is not None else ""
    if not process.state or process.state == "Z":
        return "gone", "has ended"
    if process.state == "T":
        return "stopped", "is stopped (SIGSTOP, state T)"
    if process.state == "D" or process.waits_for_device:
        within = f", in {process.waits_in}" if process.state == "D" and process.waits_in else ""
        return "disk", f"waits for the disk (state D{within}){at}"
    if thread is not None and _in_collective(thread):
        return "collective", f"waits in a collective for the other ranks{at}"
    if process.cpu >= BUSY or (process.state == "R" and process.cpu >= _STARVED):
        return "busy", f"computes ({process.cpu:.2f} CPU seconds in the last second){at}"
    if frame is not None and "sleep" in (process.waits_in + frame.source) and frame.origin == "user":
        return "sleep", f"sleeps{at}"
    if frame is not None and _at_lock(thread, frame):
        return "lock", f"waits for a lock{at}"
    return "waits", f"waits{at}"


def _at_lock(thread: Thread | None, frame: Frame) -> bool:
    """Whether the innermost frame is at a lock: in `threading`, or a line of the user's that takes one."""
    innermost = None if thread is None else thread.frames[0]
    if innermost is not None and innermost.file.endswith("/threading.py"):
        return frame.origin == "user"
    at_lock = frame.source.startswith(("with ", "async with ")) or any(w in frame.source.lower() for w in _LOCK_SOURCE)
    return innermost == frame and frame.origin == "user" and at_lock


def _in_collective(thread: Thread) -> bool:
    return any(name in frame.file for frame in thread.frames[:8] for name in _COLLECTIVE_FILES)


def _telling_frame(thread: Thread) -> Frame | None:
    for origin in ("user", "troupe", "library"):
        if (frame := thread.innermost(origin)) is not None:
            return frame
    return None


def _worth_showing(thread: Thread) -> list[Frame]:
    """The innermost frames, and the frame that matters if it is further out."""
    shown = list(thread.frames[:_SHOWN_FRAMES])
    telling = _telling_frame(thread)
    return shown if telling is None or telling in shown else [*shown, telling]

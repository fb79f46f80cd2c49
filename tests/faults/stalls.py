"""Stalls that are injected into runs, and what `troupe why` says about them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT
from tests.real.commands import Command, Run, troupe_command

RESULTS = Path(__file__).parent / "stalls.json"
PAGE = ROOT / "docs" / "guides" / "debugging.md"
BEGIN, END = "<!-- measured stalls: make test-faults -->", "<!-- end of measured stalls -->"
PLANTED = Path(__file__).parent / "planted"
QUIET_S = 9.0
"""Time without a step from which on a run counts as stalled. A step takes seconds where others use the cores."""
UNBOUNDED = ("failures.stopped_s=100000", "failures.hung_s=100000", "failures.health_interval_s=100000")
"""No bound of the run ends what stops: `troupe why` has to find it."""
_LONGEST_SUMMARY = 230
_OTHER_PATHS = re.compile(r"/\S*/(?=tests/|run/)")


@dataclass(frozen=True)
class Answer:
    """What `troupe why` said."""

    cause: str
    blocked_by: str
    summary: str
    evidence: list[str]
    seconds: float
    """From the command to its end, the start of Python included."""


@dataclass(frozen=True)
class Outcome:
    """One stall, and whether it was named."""

    stall: str
    named: bool
    seconds: float
    summary: str


def why(run: Run) -> Answer:
    """Ask as a user does."""
    began = time.monotonic()
    command = troupe_command("why", str(run.out), "--json")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        return Answer("", "", f"exit code {done.returncode}: {done.stderr.strip()}", [], seconds)
    said = json.loads(done.stdout)
    return Answer(said["cause"], said["blocked_by"], said["summary"], said["evidence"], seconds)


def wait_for_stall(run: Run) -> None:
    """Wait until no step has ended for a while."""
    run.wait_until(lambda: time.time() - (run.out / "metrics.jsonl").stat().st_mtime > QUIET_S, "the run to stall")


def record(stall: str, answer: Answer, *, cause: str, words: tuple[str, ...]) -> Outcome:
    """Keep the outcome for the table: named are the cause and every one of the words."""
    text = "\n".join([answer.summary, *answer.evidence])
    named = answer.cause in cause.split("|") and all(word in text for word in words)
    outcome = Outcome(stall, named, round(answer.seconds, 1), answer.summary)
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    rows[stall] = vars(outcome)
    RESULTS.write_text(json.dumps(rows, indent=1))
    sys.stderr.write(f"\n[{stall}] {answer.seconds:.1f} s, {answer.cause}: {text}\n")
    return outcome


def table() -> str:
    """The outcomes as a Markdown table."""
    lines = ["| stall | named | answer after, s | summary |", "|---|---|---|---|"]
    for row in json.loads(RESULTS.read_text()).values():
        outcome = Outcome(**row)
        summary = _OTHER_PATHS.sub("", outcome.summary).replace("|", "\\|").replace("`", "'")
        shown = summary if len(summary) <= _LONGEST_SUMMARY else f"{summary[:_LONGEST_SUMMARY]} ..."
        lines.append(f"| {outcome.stall} | {'yes' if outcome.named else '**no**'} | {outcome.seconds} | `{shown}` |")
    return "\n".join(lines)


def write_page() -> None:
    """Write the table between its marks in the docs."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


def planted_environment(order: Path) -> dict[str, str]:
    """Environment of a run whose processes stall on request."""
    return {"TROUPE_PLANTED": str(order), "PYTHONPATH": f"{PLANTED}:{ROOT}"}


def deadly_environment(*deaths: tuple[str, int, Path], begin: Path = Path("/")) -> dict[str, str]:
    """Environment of a run whose processes die. Each death: the function, which call of it, the file that it leaves.

    Calls count once the file `begin` exists.
    """
    planted = [{"at": at, "call": call, "mark": str(mark), "begin": str(begin)} for at, call, mark in deaths]
    return {"TROUPE_DEATHS": json.dumps(planted), "PYTHONPATH": f"{PLANTED}:{ROOT}"}


@contextlib.contextmanager
def order(path: Path, text: str) -> Iterator[None]:
    """The bug is switched on within the block."""
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """Processes are stopped within the block."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def workers(run: Command, title: str) -> list[psutil.Process]:
    """Processes of the run with this title, in the order of their ids."""
    return sorted(run.processes(title), key=lambda process: process.pid)


def services(run: Command, name: str) -> list[psutil.Process]:
    """Ray's own processes of this name."""
    return [process for process in run.processes() if process.name() == name]


@contextlib.contextmanager
def own_disk(folder: Path, mebibytes: int = 256) -> Iterator[Path]:
    """A separate file system that can be frozen, mounted at `folder`."""
    folder.mkdir(parents=True)
    image = folder.parent / f"{folder.name}.img"
    with image.open("wb") as stream:
        stream.truncate(mebibytes << 20)
    try:
        for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
            subprocess.run(command, check=True, capture_output=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
        image.unlink()


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """The file system does not take a write within the block."""
    subprocess.run(["fsfreeze", "-f", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder)], check=True)


def fill_shared_memory(run: Run) -> int:
    """Fill /dev/shm of the run, which is one of its own; returns the bytes written."""
    path = Path(f"/proc/{run.process.pid}/root/dev/shm/filler")
    written = 0
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            written += stream.write(bytes(2**20))
    return written


OWN_SHARED_MEMORY = (
    *("unshare", "-m", "sh", "-c"),
    'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"',
    "sh",
)
"""Starts a command with a /dev/shm of its own."""


def may_mount() -> bool:
    """Whether this user may mount file systems."""
    done = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True)
    return os.geteuid() == 0 and done.returncode == 0

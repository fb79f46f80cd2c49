"""The supervisor, over small processes instead of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from troupe.orchestrator.runs.supervisor import supervise


class Scripted:
    """A command that ends as told: exit codes, or signals it sends itself; and what was said and awaited meanwhile."""

    def __init__(self, folder: Path, *ends: int, saves: bool = False) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.pauses: list[float] = []
        self.script = folder / "command.py"
        self.script.write_text(
            textwrap.dedent(f"""
                import os, pathlib, sys
                folder = pathlib.Path({str(folder)!r})
                starts = len(list(folder.glob("start-*")))
                (folder / f"start-{{starts}}").write_text(" ".join(sys.argv[1:]))
                end = {list(ends)}[starts]
                if {saves}:
                    (folder / f"saved-{{starts}}").touch()
                os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
            """)
        )

    def run(self, restarts: int = 2) -> int:
        """Supervise it."""
        command = [sys.executable, str(self.script), "SPEC"]
        return supervise(command, lambda: len(self.saved), restarts, self.lines.append, self.pauses.append)

    @property
    def saved(self) -> list[Path]:
        """Checkpoints."""
        return list(self.folder.glob("saved-*"))

    @property
    def starts(self) -> list[str]:
        """Arguments of every start."""
        return [path.read_text() for path in sorted(self.folder.glob("start-*"))]


@pytest.mark.parametrize("code", [0, 2, 130])
def test_a_run_that_ended_for_good_is_not_started_again(tmp_path: Path, code: int) -> None:
    run = Scripted(tmp_path, code)
    assert run.run() == code
    assert run.starts == ["SPEC"] and run.lines == []


def test_an_unexpected_end_resumes(tmp_path: Path) -> None:
    run = Scripted(tmp_path, -signal.SIGKILL, 1, 0)
    assert run.run() == 0
    assert run.starts == ["SPEC", "SPEC --resume", "SPEC --resume"]
    assert run.lines == [
        "the run was killed by SIGKILL; starting it again from step 0 (restart 1 of 2)",
        "the run ended with exit code 1; starting it again from step 0 (restart 2 of 2)",
    ]
    assert run.pauses == [2.0, 4.0]


def test_restarts_without_a_new_checkpoint_are_bounded(tmp_path: Path) -> None:
    run = Scripted(tmp_path, *[-signal.SIGSEGV] * 3)
    assert run.run() == 128 + signal.SIGSEGV
    assert run.lines[-1] == "the run was killed by SIGSEGV: 2 restarts without a new checkpoint (failures.run_restarts)"


def test_a_new_checkpoint_gives_all_restarts_back(tmp_path: Path) -> None:
    run = Scripted(tmp_path, *[1] * 6, 0, saves=True)
    assert run.run(restarts=1) == 0
    assert len(run.starts) == 7


SUPERVISOR = """
import sys
from troupe.orchestrator.runs.supervisor import supervise
sys.exit(supervise([sys.executable, "-c", sys.argv[1]], lambda: 0, 3, print, lambda _: None))
"""
SAVES = """
import signal, sys, time
def save(number, _):
    print("saved after", signal.Signals(number).name, flush=True)
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
print("running", flush=True)
time.sleep(60)
"""


def signals_of_a_terminal() -> None:
    """Also where these tests run under `nohup`, or in the background of a script, which ignores Ctrl-C."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def started(script: str) -> subprocess.Popen[str]:
    """A supervisor over a run that saves on a signal; returns once the run is running."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=signals_of_a_terminal,
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_run_once_and_ends_both(number: signal.Signals) -> None:
    """Ctrl-C reaches the whole foreground group, of which the run is no part."""
    process = started(SAVES)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, f"saved after {number.name}\n")


def test_a_signal_that_interrupts_no_wait_reaches_the_run() -> None:
    """It came just before the wait, or to another thread: the handler runs when the main thread looks."""
    run = [sys.executable, "-c", "import time; time.sleep(10)"]

    def send() -> None:
        time.sleep(1)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert supervise(run, lambda: 0, 3, print, lambda _: None) == -signal.SIGTERM


def test_a_run_that_is_stopped_is_not_started_again_whatever_its_exit_code(tmp_path: Path) -> None:
    process = started(SAVES.replace("sys.exit(130)", "sys.exit(1)"))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "saved after SIGTERM\n")


def test_a_run_saves_when_its_supervisor_is_killed() -> None:
    process = started(SAVES)
    (run,) = psutil.Process(process.pid).children()
    process.kill()
    output, _ = process.communicate(timeout=30)
    assert output == "saved after SIGTERM\n"
    deadline = time.monotonic() + 30
    while run.is_running() and run.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not run.is_running() or run.status() == psutil.STATUS_ZOMBIE

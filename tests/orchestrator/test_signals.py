"""A command that is asked to stop ends with code 130 and one line, whatever it is doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.real.commands import GRPO
from troupe.orchestrator.cli import app
from troupe.orchestrator.signals import held_back
from troupe.workers.isolation.lifetime import exit_with

MARK = "TROUPE_TEST_COMMAND"
"""Environment variable of a command and of all that it starts."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def wait_until_handled(pid: int) -> None:
    """Wait until a process handles the last of the signals, which Python does not do itself."""
    bit, deadline = 1 << (SIGNALS[-1] - 1), time.monotonic() + 60
    while not handled_signals(pid) & bit and time.monotonic() < deadline:
        time.sleep(0.002)


def handled_signals(pid: int) -> int:
    """The signals that a process handles, as bits."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(caught, 16)


def started(*arguments: str) -> subprocess.Popen[str]:
    def handled_by_default() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "troupe", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=handled_by_default,
        start_new_session=True,
        env=os.environ | {MARK: arguments[-1]},
    )


def marked(value: str) -> list[int]:
    """The processes that a command has started and that still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("number", "seconds"),
    [*((number, 0.0) for number in SIGNALS), (signal.SIGINT, 0.3), (signal.SIGTERM, 0.8), (signal.SIGHUP, 1.7)],
)
@pytest.mark.usefixtures("tiny_model")
def test_a_signal_in_the_first_seconds(tmp_path: Path, number: signal.Signals, seconds: float) -> None:
    """Python has started; modules are imported, the spec is checked, Ray starts, and the server of workers imports."""
    command = started("run", str(GRPO), "--out", str(tmp_path / "run"))
    wait_until_handled(command.pid)
    time.sleep(seconds)
    command.send_signal(number)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 130, said
    assert said == "stopped\n"
    deadline = time.monotonic() + 60
    while left := marked(str(tmp_path / "run")):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.usefixtures("tiny_model")
def test_a_signal_in_the_pause_of_the_supervisor() -> None:
    """The run fails as its folder cannot be made; the supervisor waits before it starts it again."""
    command = started("run", str(GRPO), "--out", "/proc/no", "--supervise")
    assert command.stderr is not None
    for line in command.stderr:
        if "starting it again" in line:
            break
    command.send_signal(signal.SIGTERM)
    _, said = command.communicate(timeout=60)
    assert (command.returncode, said) == (130, "stopped\n")


def test_a_process_ends_with_one_that_nobody_reaps() -> None:
    """A dead process keeps its id until it is reaped: a test for the id would find it alive for good."""
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        f"from {exit_with.__module__} import exit_with; exit_with({owner.pid}); print('watches', flush=True); input()"
    )
    watcher = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert watcher.stdout is not None and watcher.stdout.readline() == "watches\n"
    os.kill(owner.pid, signal.SIGKILL)
    assert watcher.wait(20) == 1
    assert Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    late = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert late.wait(20) == 1
    owner.wait()


def test_a_command_within_another_program_leaves_its_signals() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert CliRunner().invoke(app, ["algorithms"]).exit_code == 0
    with held_back():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before

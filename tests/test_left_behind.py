"""What tests of whole commands see of processes that a command leaves behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fork_server
from tests.conftest import ROOT
from tests.real import commands
from tests.real.commands import Command, running


def test_a_process_without_the_mark_of_its_command_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's agents, whose titles hide their environment."""
    monkeypatch.setattr(commands, "EXIT_TIMEOUT_S", 0.5)
    with running(Command(tmp_path, ["bash", "-c", "env -i sleep 271828 & sleep 2"])) as command:
        assert command.wait() == 0
        (left,) = command.leftover_processes()
    assert left.endswith(" sleep 271828")
    assert command.leftover_processes() == []


CALLER = f"""
import os, time
from tests import fork_server
forked = fork_server.Forked(fork_server.start("{__name__}:serve", os.environ), {{}}, [])
print(forked.pid, flush=True)
time.sleep(60)
"""


def serve(listening: str, owner_pipe: str) -> None:
    """Fork processes that sleep."""
    fork_server.serve(listening, owner_pipe, lambda request: time.sleep(60), with_caller=True)


def test_a_command_ends_with_the_tests_that_are_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", CALLER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        command = os.pidfd_open(int(tests.stdout.readline()))
        time.sleep(0.2)
        assert not select.select([command], [], [], 0)[0]
        tests.send_signal(signal.SIGKILL)
        assert select.select([command], [], [], 30)[0]
    os.close(command)

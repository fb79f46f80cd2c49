"""Child processes that are stopped: they save, and one that does not is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from troupe.orchestrator.runs import children
from troupe.orchestrator.runs.children import ChildCommand, stop_all

SAVES = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(130)))"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Script(ChildCommand):
    """A script instead of a command."""

    def __init__(self, code: str, log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            command = [sys.executable, "-uc", f"{code}; print('running'); time.sleep(60)"]
            self._process = children.start_child(command, output)
        while "running" not in log.read_text():
            assert self.ended() is None


def test_children_save_when_they_are_stopped(tmp_path: Path) -> None:
    found = [Script(SAVES, tmp_path / f"{number}.log") for number in range(2)]
    stop_all(found)
    assert [(one.ended(), one.last_line()) for one in found] == [(130, "saved")] * 2


def test_a_child_that_does_not_exit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STOP_S", 0.2)
    monkeypatch.setattr(children, "EXIT_S", 0.2)
    one = Script(DEAF, tmp_path / "log")
    stop_all([one])
    assert one._process.wait(30) == -9


def test_a_second_interrupt_asks_at_once_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "EXIT_S", 0.2)
    asked: list[float] = []

    def interrupted(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(children.time, "sleep", interrupted)
    one = Script(DEAF, tmp_path / "log")
    stop_all([one])
    assert one._process.wait(30) == -9

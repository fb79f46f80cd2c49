"""Questions to a short-lived process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.workers.isolation.probe import ProbeFailed, ask

_ASKING = """
import os, sys, threading
from troupe.workers.isolation.probe import ask

def set_variables():
    while True:
        for number in range(200):
            os.environ[f"VARIABLE_{number}"] = "1"
        for number in range(200):
            del os.environ[f"VARIABLE_{number}"]

threading.Thread(target=set_variables, daemon=True).start()
sys.stdout.write(str([ask("builtins:range", number, 60) for number in range(25)]))
os._exit(0)
"""


def test_a_process_is_asked_while_another_thread_sets_the_environment() -> None:
    """It used to fail with "Bad address": the new process read the list of variables while it was moved."""
    done = subprocess.run([sys.executable, "-c", _ASKING], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == str([list(range(number)) for number in range(25)]), done.stderr


def test_a_message_of_several_lines_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "several.py").write_text("def fails(request):\n    raise ValueError('no game:\\n  chess\\n****')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProbeFailed, match=r"exit code 1: ValueError: no game: chess \*{4}$") as failed:
        ask("several:fails", None, 60.0)
    assert failed.value.raised == "no game: chess ****"

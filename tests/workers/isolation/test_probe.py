"""Questions to a short-lived process."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

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

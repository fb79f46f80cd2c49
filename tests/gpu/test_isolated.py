"""Tests on GPUs are skipped with the reason, and processes of a test end with it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import conftest
from tests.gpu import isolated
from tests.gpu.isolated import Measurements
from tests.real.commands import Command
from troupe.orchestrator.plan.nvidia import Gpu, Graphics
from troupe.workers.contract.units import GIB


def measure(what: str) -> Measurements:
    """Measure what a test wants, or find something wrong."""
    assert what == "right", f"it is {what}"
    return {"error": 0.25}


def test_measurements_are_written_or_the_test_fails(tmp_path: Path) -> None:
    isolated.main(__name__, "measure", str(tmp_path / "found.json"), "right")
    assert json.loads((tmp_path / "found.json").read_text()) == {"error": 0.25}
    with pytest.raises(AssertionError, match="it is wrong"):
        isolated.isolated(tmp_path, measure, "wrong")


def test_processes_that_left_their_group_end_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import time; time.sleep(100)"
    code = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {child!r}], "
    code += "start_new_session=True).pid, flush=True); time.sleep(100)"
    monkeypatch.setattr(isolated, "BOUND_S", 3.0)
    command, began = Command(tmp_path, [sys.executable, "-c", code]), time.monotonic()
    with pytest.raises(AssertionError, match="still running after 3 s"):
        isolated.finish(command)
    assert time.monotonic() - began < 90
    assert command.leftover_processes() == []
    assert int(command.stdout) not in {process.pid for process in psutil.process_iter() if process.status() != "zombie"}


@pytest.mark.parametrize(
    ("visible", "count", "gib", "reason"),
    [
        (0, 1, 0, "needs 1 NVIDIA GPU: none visible"),
        (1, 2, 0, "needs 2 NVIDIA GPUs: 1 visible"),
        (1, 1, 78, "needs a GPU of 78 GiB: 24 GiB visible"),
        (2, 2, 24, ""),
    ],
)
def test_what_the_gpus_lack_is_the_reason_of_a_skip(
    visible: int, count: int, gib: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "graphics", lambda: Graphics(gpus=(Gpu("a GPU", 24 * GIB, 0, (9, 0)),) * visible))
    conftest.gpus.cache_clear()
    assert conftest.missing_gpus(count, gib=gib) == reason
    conftest.gpus.cache_clear()

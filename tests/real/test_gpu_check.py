"""The GPU check on the CPU, with the tiny model: the check itself works."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.gpu_check.record import read
from tests.real.commands import Command, running

PIECES = ("install", "agreement", "packing", "sync")
"""Those that do not repeat what other tests run: specs of runs are validated without a start (`tests/deploy/`)."""


@pytest.mark.long
def test_pieces_run_on_the_cpu_and_are_not_repeated(tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = [sys.executable, "-m", "deploy.gpu_check", "--on-cpu", "--only", *PIECES, "--out", str(out)]
    with running(Command(tmp_path, call)) as command:
        assert command.wait() == 0, command.output
        assert command.leftover_processes() == []
    record = read(out / "result.json")
    assert record is not None and record.mode == "cpu" and record.passed == set(PIECES)
    rate = record.results["sync"].measurements["GB_per_s"]
    assert isinstance(rate, float) and rate > 0
    with running(Command(tmp_path, call)) as command:
        assert command.wait() == 0, command.output
        assert "sync: passed before" in command.stdout
    assert read(out / "result.json") == record

"""What is removed at the death of its process, and what is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from troupe.workers.isolation.lifetime import remove_at_death, retire


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "version"
    yield path
    retire(path)


def _guards(path: Path) -> list[psutil.Process]:
    """Processes that are to remove a path."""
    return [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-1:] == [str(path)]]


def _wait_for_no_guard(path: Path) -> None:
    deadline = time.monotonic() + 20.0
    while _guards(path):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_goes_with_its_process_however_it_ends(tmp_path: Path) -> None:
    path, code = tmp_path / "version", "import os, sys; from troupe.workers.isolation.lifetime import remove_at_death"
    for _ in range(2):  # the second file has the name of the first
        path.touch()
        killed = f"{code}; remove_at_death(sys.argv[1]); remove_at_death(sys.argv[1]); os.kill(os.getpid(), 9)"
        ended = subprocess.run([sys.executable, "-c", killed, str(path)], check=False)
        assert ended.returncode == -signal.SIGKILL
        _wait_for_no_guard(path)
        assert not path.exists()


def test_a_path_has_one_guard_and_its_file_stays(path: Path) -> None:
    for _ in range(3):
        path.touch()
        remove_at_death(path)
    assert len(_guards(path)) == 1 and path.exists()


def test_the_guard_of_a_retired_file_leaves_the_next_one_of_its_name(path: Path) -> None:
    path.touch()
    remove_at_death(path)
    retire(path)
    assert not path.exists()
    path.touch()
    _wait_for_no_guard(path)
    assert path.exists()


def test_a_file_is_retired_whose_guard_was_killed(path: Path) -> None:
    path.touch()
    remove_at_death(path)
    for guard in _guards(path):
        guard.kill()
    _wait_for_no_guard(path)
    retire(path)
    assert not path.exists()

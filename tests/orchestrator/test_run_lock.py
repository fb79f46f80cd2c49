"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.live.lock import LOCK_FILE, LockHolder, RunLock, kept, locked

HOLD = """
import sys
from pathlib import Path
from troupe.orchestrator.live.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    {then}
"""


def holder(folder: Path, then: str) -> subprocess.Popen[str]:
    """A process that holds the lock."""
    code = HOLD.format(then=then)
    started = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None and started.stdout.readline() == "locked\n"
    return started


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    first = holder(tmp_path, "import time; time.sleep(600)")
    try:
        with pytest.raises(UsageError) as refused, locked(tmp_path):
            pytest.fail("two runs hold the lock")
    finally:
        first.kill()
        first.wait()
    text = str(refused.value)
    assert text.startswith(f"{tmp_path}: a run is active in it (process {first.pid} of ")
    assert " since 20" in text and text.endswith("stop it (`troupe stop`), or use another --out")


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    first = holder(tmp_path, "import time; time.sleep(600)")
    first.kill()
    first.wait()
    with locked(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()


def test_processes_that_a_run_leaves_do_not_hold_its_lock(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).pid)"
    )
    first = holder(tmp_path, f"{child}; import os; os._exit(0)")
    first.wait()
    with locked(tmp_path):
        pass


def test_one_of_many_that_start_together_wins(tmp_path: Path) -> None:
    code = HOLD.format(then="input()")
    command = [sys.executable, "-c", code, str(tmp_path)]
    racing = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        for _ in range(6)
    ]
    losers = []
    while len(losers) < 5:
        time.sleep(0.05)
        losers = [process for process in racing if process.poll() is not None]
    (winner,) = [process for process in racing if process not in losers]
    out, _ = winner.communicate(b"\n", timeout=30)
    assert (out, winner.returncode) == (b"locked\n", 0)
    assert all(b"UsageError" in process.communicate()[1] for process in losers)


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert "make sure that no other run uses this folder" in caplog.text


def test_a_removed_folder_admits_no_second_run(tmp_path: Path) -> None:
    """Neither at once, nor after the folder is made again."""
    folder = tmp_path / "run"
    folder.mkdir()
    first = holder(folder, "import time; time.sleep(600)")
    try:
        shutil.rmtree(folder)
        folder.mkdir()
        with pytest.raises(UsageError, match="a run is active in it"), locked(folder):
            pytest.fail("two runs in one folder")
    finally:
        first.kill()
        first.wait()
    with locked(folder):
        pass


def test_the_folder_its_lock_and_its_spec_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on another host, which does not see the name in this kernel, finds the file locked."""
    monkeypatch.setattr("troupe.orchestrator.live.lock._LOOK_S", 0.02)
    looks, renew = 0, RunLock.renew

    def counted(lock: RunLock) -> bool:
        nonlocal looks
        looks += 1
        return renew(lock)

    monkeypatch.setattr(RunLock, "renew", counted)
    folder = tmp_path / "run"
    folder.mkdir()
    spec = folder / "spec.yaml"
    with locked(folder) as lock, kept(lock, spec):
        for text in ("name: first", "name: changed"):
            spec.write_text(text)
            seen = looks
            wait_for(lambda seen=seen: looks > seen + 1)  # the file was read after the first one
            folder.rename(tmp_path / text)
            wait_for(spec.exists)
            assert spec.read_text() == text
            assert f'"pid": {os.getpid()}' in (folder / LOCK_FILE).read_text()
            probe = os.open(folder / LOCK_FILE, os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(probe)


def test_a_lock_is_renewed_for_other_hosts_and_empty_when_it_is_closed(tmp_path: Path) -> None:
    with locked(tmp_path) as lock:
        os.utime(tmp_path / LOCK_FILE, (0.0, 0.0))
        assert not lock.renew()
        holder = LockHolder.of(tmp_path)
        assert holder is not None and holder.is_active and holder.silent_s < 60
    assert LockHolder.of(tmp_path) is None


def test_a_lock_that_is_closed_while_it_is_renewed_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that renews it waits for a slow disk; the descriptor it had may be another file's by then."""
    folder = tmp_path / "run"
    folder.mkdir()
    lock, slow, go_on = RunLock(folder), threading.Event(), threading.Event()
    open_file, results = RunLock._lock, list[bool]()

    def opened_slowly(held: RunLock) -> int:
        slow.set()
        assert go_on.wait(60)
        return open_file(held)

    monkeypatch.setattr(RunLock, "_lock", opened_slowly)
    shutil.rmtree(folder)
    renewing = threading.Thread(target=lambda: results.append(lock.renew()))
    renewing.start()
    assert slow.wait(60)
    number = lock._file
    lock.close()
    other = os.dup2(os.open(tmp_path, os.O_RDONLY), number)
    go_on.set()
    renewing.join(60)
    assert results == [False] and not lock.renew()
    os.close(other)  # nobody has closed it
    monkeypatch.setattr(RunLock, "_lock", open_file)
    with locked(folder):
        pass


def test_a_full_disk_names_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/{LOCK_FILE}'"), locked(tmp_path):
        pytest.fail("there is no space")

"""Semaphores and shared memory of a worker that is killed with everything that it has started."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT

CODE = """
import multiprocessing, os
from multiprocessing import shared_memory
from troupe.workers.engine.process import OWNER_VARIABLE, die_with_owner, private_shared_memory
private_shared_memory()
context = multiprocessing.get_context("spawn")
locks = [context.Lock() for _ in range(3)]
def share():
    os.environ[OWNER_VARIABLE] = str(os.getppid())
    die_with_owner()
    shared_memory.SharedMemory(create=True, size=1)
    os._exit(0)
child = multiprocessing.get_context("fork").Process(target=share)
child.start()
child.join()
from multiprocessing import resource_tracker
print(os.getpid(), resource_tracker._resource_tracker._pid, flush=True)
input()
"""


def test_what_processes_share_does_not_outlive_a_worker_whose_tracker_is_killed_too() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert worker.stdout is not None
    pid, tracker = worker.stdout.readline().split()
    found = list(Path("/dev/shm").glob(f"sem.troupe-{pid}-*"))
    assert len(found) == 3
    found += Path("/dev/shm").glob(f"troupe.{pid}.*")
    assert len(found) == 4
    subprocess.run(["kill", "-9", tracker, pid], check=True)
    worker.wait()
    deadline = time.monotonic() + 60
    while any(path.exists() for path in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(path.exists() for path in found)

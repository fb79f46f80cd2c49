"""Memory of processes that share pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

from troupe.workers.contract.units import MIB
from troupe.workers.telemetry.peak_memory import FamilyPeak, resident_peak

FAMILY = """
import json, mmap, os, signal
from troupe.workers.contract.units import MIB
from troupe.workers.telemetry.peak_memory import FamilyPeak, resident_peak

private = bytearray(os.urandom(1)) * (128 * MIB)
shared = mmap.mmap(-1, 64 * MIB)
shared.write(b"x" * (64 * MIB))
child = os.fork()
if child == 0:
    sum(private[::4096]), sum(shared[::4096])
    signal.pause()
import time
while resident_peak([child]) - resident_peak() < 190 * MIB:
    time.sleep(0.01)
family = FamilyPeak()
print(json.dumps([resident_peak(), resident_peak([child]), family.read([child]), family.read([child])]))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(json.dumps(family.read([child])))
"""


def test_pages_that_processes_share_count_once_and_shared_memory_not_at_all() -> None:
    done = subprocess.run([sys.executable, "-c", FAMILY], check=True, capture_output=True, text=True, timeout=60)
    alone, each, family, again = json.loads(done.stdout.splitlines()[0])
    assert each > alone + 190 * MIB, "the sum of both peaks has the pages twice"
    assert alone - 110 * MIB < family < alone - 40 * MIB, "the parent's pages once, without 64 MiB of shared memory"
    assert again == pytest.approx(family, rel=0.1), "the kernel counts resident pages approximately"
    assert json.loads(done.stdout.splitlines()[1]) < family, "a child that has ended is gone"


def test_a_process_alone_has_its_own_peak() -> None:
    own = psutil.Process().memory_info()
    assert FamilyPeak().read(()) <= resident_peak()
    assert resident_peak() >= own.rss * 0.9
    assert FamilyPeak().read([_gone()]) <= resident_peak(), "a process that is gone adds nothing"


def _gone() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child

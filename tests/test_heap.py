"""What the C library does with memory that tensors give back, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the calls")

SCRIPT = """
import torch
from workers import heap

def resident():
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096 / 2**20

heap.return_freed()
torch.ones(1)  # torch's own threads and buffers
start = resident()
tensors = [torch.ones(2**20) for _ in range(16)]
held = resident() - start
del tensors[:-1]  # the last one is at the top, and would hold up the others
print(held, resident() - start)
"""


def test_what_is_freed_is_returned_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    held, freed = (float(word) for word in done.stdout.split())
    assert held > 60 and freed < 12

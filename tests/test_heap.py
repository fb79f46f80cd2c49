"""What the C library does with memory that tensors give back, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the calls")

SCRIPT = """
import sys
import torch
from workers import heap

def resident():
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096 / 2**20

{before}
torch.ones(1)  # torch's own threads and buffers
start = resident()
tensor = torch.ones(64 * 2**20 // 4)
held = resident() - start
del tensor
freed = resident() - start
{after}
print(held, freed, resident() - start)
"""


def measured(before: str, after: str = "") -> list[float]:
    """MiB of a tensor of 64 while it is held, once it is freed, and after `after`."""
    script = SCRIPT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return [float(word) for word in done.stdout.split()]


def test_what_is_freed_is_kept_and_given_back_when_told_to() -> None:
    held, freed, given_back = measured("heap.keep_freed()", "heap.return_kept()")
    assert held > 60 and freed > 60
    assert given_back < 8


def test_what_is_freed_is_returned_by_default_and_under_zero_3() -> None:
    for before in ("", "heap.return_freed()"):
        held, freed, _ = measured(before)
        assert held > 60 and freed < 8

"""The rollout worker dies: nothing that it started outlives it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.long


def engines(pid: int) -> list[psutil.Process]:
    """Engine processes below this one; they have that title from when they begin to load."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if "EngineCore" in " ".join(process.cmdline()):
                found.append(process)
    return found


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Names of the files in shared memory that they hold, open or mapped."""
    found: set[str] = set()
    for process in processes:
        told: list[str] = []
        with suppress(OSError):  # it is gone
            told += (Path("/proc") / str(process.pid) / "maps").read_text().splitlines()
            for link in (Path("/proc") / str(process.pid) / "fd").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    told.append(os.readlink(link))
        found |= {match[1] for line in told if (match := re.search(r"/dev/shm/(\S+)", line))}
    return found


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.real.rollout_kit import chat, pool, rollout_config
from workers.messages import GroupRequest
from workers.rollout import RolloutWorker

async def main():
    worker = RolloutWorker(rollout_config(Path(sys.argv[1]), max_tokens=900), "rollout-0")
    await worker.start()
    print("started", flush=True)
    await worker.generate(GroupRequest("p", 0, 0, 16, 1), pool(chat("Go on.")))
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("phase", ["starting", "generating"])
async def test_no_process_and_no_file_outlives_a_killed_worker(tiny_model: Path, tmp_path: Path, phase: str) -> None:
    """kill -9 of the worker while its engine loads or generates: all below it end by themselves."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    below: list[psutil.Process] = []
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tiny_model)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
    )
    try:
        assert parent.stdout is not None
        if phase == "generating":
            assert any(line.strip() == "started" for line in parent.stdout)
            await asyncio.sleep(0.3)
        else:
            while not engines(parent.pid):
                await asyncio.sleep(0.2)
                assert parent.poll() is None
        below = psutil.Process(parent.pid).children(recursive=True)
        assert len(below) >= 2
        held = shared_memory_of([psutil.Process(parent.pid), *below])
        assert held or phase == "starting"  # it may have made none yet
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # An engine that is still importing notices when it is done with that.
        deadline = time.monotonic() + (60 if phase == "starting" else 10)
        while (alive := living(below)) and time.monotonic() < deadline:
            held |= shared_memory_of(alive)
            await asyncio.sleep(0.02)
        assert alive == []
        await asyncio.sleep(1)
        assert held & set(os.listdir("/dev/shm")) == set()
    finally:
        parent.kill()
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()

"""After SIGKILL of a rollout worker, none of its processes, sockets and shared-memory files remain."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import descendants

pytestmark = pytest.mark.long


def engines(pid: int) -> list[psutil.Process]:
    """Engine processes that descend from this one. vLLM sets their title when they begin to load."""
    return descendants(pid, "EngineCore")


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Processes that have not ended."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def shared_memory_files(processes: list[psutil.Process]) -> set[str]:
    """Names of the shared-memory files that the processes have open or mapped."""
    found: set[str] = set()
    for process in processes:
        paths: list[str] = []
        with suppress(OSError):  # the process has ended
            paths += (Path("/proc") / str(process.pid) / "maps").read_text().splitlines()
            for link in (Path("/proc") / str(process.pid) / "fd").iterdir():
                with suppress(OSError):  # the file was closed meanwhile
                    paths.append(os.readlink(link))
        found |= {match[1] for line in paths if (match := re.search(r"/dev/shm/(\S+)", line))}
    return found


CHILD = """
import asyncio, sys, time
from importlib import import_module
from pathlib import Path
from tests.real.rollout_helpers import chat, prompt_table, rollout_config
from troupe.workers import rollout
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.rollout import RolloutWorker

def never_answer():
    # vLLM's engine waits for the answer of this process, for up to five minutes, before it loads anything.
    def wait(*_):
        print("silent", flush=True)
        time.sleep(600)
    def engine_args(config):
        import_module("vllm.v1.engine.utils").wait_for_engine_startup = wait
        return arguments(config)
    arguments, rollout.engine_args = rollout.engine_args, engine_args

async def main():
    if sys.argv[2] == "connecting":
        never_answer()
    config = rollout_config(Path(sys.argv[1]), max_tokens=900)
    if sys.argv[2] == "generating":
        engine = config.engine.model_copy(update={"tensor_parallel_size": 2, "threads": 1})
        config = config.model_copy(update={"engine": engine})
    worker = RolloutWorker(config, "rollout-0")
    await worker.start()
    print("started", flush=True)
    await worker.generate(GroupRequest("p", 0, 0, 16, 1), prompt_table(chat("Go on.")))
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("phase", ["connecting", "starting", "generating"])
async def test_no_process_and_no_file_remains_of_a_killed_worker(tiny_model: Path, tmp_path: Path, phase: str) -> None:
    """SIGKILL of the worker while its engine connects, loads or generates: all its descendants exit on their own.

    The one that generates has two ranks, so that its descendants are an engine and the processes of the ranks.
    """
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    temporary = tempfile.mkdtemp()  # a socket's path is limited to some hundred characters
    below: list[psutil.Process] = []
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tiny_model), phase],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        text=True,
    )
    try:
        assert parent.stdout is not None
        if phase == "generating":
            assert any(line.strip() == "started" for line in parent.stdout)
            await asyncio.sleep(0.3)
        else:
            if phase == "connecting":
                assert any(line.strip() == "silent" for line in parent.stdout)
            while not engines(parent.pid):
                await asyncio.sleep(0.2)
                assert parent.poll() is None
        below = descendants(parent.pid)
        assert len(below) >= 2
        held = shared_memory_files([psutil.Process(parent.pid), *below])
        # An engine that is loading may have made none.
        assert held or os.listdir(temporary) or phase != "generating"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # A process notices in its next moment with the interpreter's lock, which loading a model holds for seconds.
        deadline = time.monotonic() + 60
        while (alive := running(below)) and time.monotonic() < deadline:
            held |= shared_memory_files(alive)
            await asyncio.sleep(0.02)
        assert alive == []
        deadline = time.monotonic() + 60
        while (left := held & set(os.listdir("/dev/shm")) or os.listdir(temporary)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert not left
    finally:
        parent.kill()
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(temporary)

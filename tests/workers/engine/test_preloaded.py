"""A worker's process imports vLLM once, for itself and for its engine, and ends with Ray meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from troupe.workers.contract.config import EngineProcess
from troupe.workers.isolation.child import python_command

ENTRY = "troupe.workers.engine.preloaded:run_worker"
ENGINE = EngineProcess(device="cpu", threads=1, enforce_eager=True).model_dump_json()
SCRIPT = """
import os, sys
from troupe.workers.engine import process

def told(pipe):
    pipe.send("vllm.v1.worker.cpu_worker" in sys.modules)

if __name__ == "__main__":
    process.import_ahead()
    context = process._ForkedContext()
    here, there = context.Pipe()
    child = context.Process(target=told, args=(there,))
    child.start()
    print(sys.argv[1:], "vllm.v1.engine.async_llm" in sys.modules, here.recv(), os.environ["OMP_NUM_THREADS"])
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
sys.stdin.read()
"""


IMPORT = """
import pathlib, time

(pathlib.Path(__file__).parent.parent / "begun").touch()
while True:
    time.sleep(0.1)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.real
def test_the_script_of_ray_runs_in_a_process_that_has_imported_vllm_and_so_has_its_engine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*python_command(ENTRY, ENGINE), str(script), "--of", "ray"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "['--of', 'ray'] True True 1\n", done.stderr
    assert "Traceback" not in done.stderr and "resource_tracker" not in done.stderr


def test_a_process_that_imports_vllm_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends its workers, and this process is none yet. The import takes as long as the test."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    command = [sys.executable, "-c", PARENT, *python_command(ENTRY, ENGINE), str(tmp_path / "script.py")]
    parent = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        while not (tmp_path / "begun").exists():
            assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        child.wait(60)
    finally:
        parent.kill()
        if child.is_running():
            child.kill()

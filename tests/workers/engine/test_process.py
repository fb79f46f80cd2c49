"""Engines are forked from a process that has imported vLLM, and they end with the one that starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

CODE = """
import multiprocessing, os
from troupe.workers.engine import process
from troupe.workers.engine.owner_watch import FOLDER_VARIABLE, temporary_folder

def told(pipe):
    pipe.send((os.environ.get("SET_LATER"), os.environ["SET_BEFORE"], os.getppid()))

if __name__ == "__main__":
    process._IMPORTED_AHEAD[:] = ["json.tool"]
    os.environ |= {"SET_BEFORE": "old", FOLDER_VARIABLE: temporary_folder()}
    process.import_ahead()
    os.environ |= {"SET_LATER": "1", "SET_BEFORE": "new"}
    here, there = multiprocessing.Pipe()
    child = process._ForkedContext().Process(target=told, args=(there,))
    child.start()
    later, before, server = here.recv()
    child.join()
    assert (later, before) == ("1", "new")
    assert server != os.getpid() and child.exitcode == 0
    print("ok")
"""


def test_a_forked_process_has_the_environment_of_the_one_that_starts_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CODE)
    command, environment = [sys.executable, str(script)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr


OWNER = """
import os, sys, tempfile, time
from troupe.workers.engine import process
from troupe.workers.engine.owner_watch import FOLDER_VARIABLE, OWNER_VARIABLE, temporary_folder

def target():
    handle, path = tempfile.mkstemp()
    print(os.getpid(), path, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    process._IMPORTED_AHEAD[:] = ["json.tool"]
    os.environ |= {OWNER_VARIABLE: str(os.getpid()), FOLDER_VARIABLE: temporary_folder()}
    if sys.argv[1] == "forked":
        process.import_ahead()
    context = {"forked": process._ForkedContext, "spawned": process._SpawnContext}[sys.argv[1]]()
    context.Process(target=target).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_an_engine_and_its_temporary_files_end_with_the_process_that_starts_it(how: str, tmp_path: Path) -> None:
    """From its first moment, before it imports what registers the weight transfer."""
    script = tmp_path / "script.py"
    script.write_text(OWNER)
    temporary = tempfile.mkdtemp()  # a socket's path is limited to some hundred characters
    command = [sys.executable, str(script), how]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    engine = None
    try:
        assert owner.stdout is not None
        pid, path = owner.stdout.readline().split()
        engine = psutil.Process(int(pid))
        assert Path(path).is_file()
        assert Path(path).is_relative_to(temporary)
        owner.kill()
        engine.wait(30)
        deadline = time.monotonic() + 30
        while os.listdir(temporary) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.listdir(temporary) == []
    finally:
        owner.kill()
        owner.wait()
        if engine is not None and engine.is_running():
            engine.kill()
        shutil.rmtree(temporary)

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
import gc, multiprocessing, os, sys, threading
import tqdm
from troupe.workers.engine import process
from troupe.workers.engine.process import FOLDER_VARIABLE, temporary_folder

def rank():
    pass

def told(pipe):
    spawned = multiprocessing.get_context("spawn").Process(target=rank)  # as vLLM starts the ranks of an engine
    spawned.start()
    spawned.join()
    assert spawned.exitcode == 0
    assert gc.isenabled()
    assert isinstance(tqdm.tqdm.get_lock(), type(threading.RLock()))  # no semaphore, which would outlive an engine
    imported_without_collections = process._NO_COLLECTIONS in sys.modules
    assert imported_without_collections == (sys.argv[1] == "spawned")
    module = sys.modules.get("this_is_imported_once")
    imported = module is not None and not hasattr(module, "served")
    pipe.send((os.environ.get("SET_LATER"), os.environ["SET_BEFORE"], os.getppid(), imported))

if __name__ == "__main__":
    process.IMPORTED_AHEAD[:] = ["json.tool"]
    os.environ |= {"SET_BEFORE": "old", FOLDER_VARIABLE: temporary_folder()}
    if sys.argv[1] == "forked":
        import this_is_imported_once
        process.fork_server()
        this_is_imported_once.served = True
    process.import_ahead()
    os.environ |= {"SET_LATER": "1", "SET_BEFORE": "new"}
    here, there = multiprocessing.Pipe()
    child = process._ForkedProcess(target=told, args=(there,))
    child.start()
    later, before, server, imported = here.recv()
    child.join()
    assert imported == (sys.argv[1] == "forked")
    assert (later, before) == ("1", "new")
    assert server != os.getpid() and child.exitcode == 0
    print("ok")
"""


@pytest.mark.parametrize("how", ["spawned", "forked"])
def test_a_forked_process_has_the_environment_of_the_one_that_starts_it(how: str, tmp_path: Path) -> None:
    """From a fork server that was spawned, and from one that is a fork and has what its parent had imported."""
    script = tmp_path / "script.py"
    script.write_text(CODE)
    (tmp_path / "this_is_imported_once.py").write_text("")
    command, environment = [sys.executable, str(script), how], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ok\n", "")


OWNER = """
import os, sys, tempfile, time
from troupe.workers.engine import process
from troupe.workers.engine.process import FOLDER_VARIABLE, OWNER_VARIABLE, temporary_folder

def target():
    handle, path = tempfile.mkstemp()
    print(os.getpid(), path, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    process.IMPORTED_AHEAD[:] = ["json.tool"]
    os.environ |= {OWNER_VARIABLE: str(os.getpid()), FOLDER_VARIABLE: temporary_folder()}
    if sys.argv[1] == "forked":
        process.import_ahead()
    if sys.argv[1] == "forked twice":
        process.fork_server()
    kind = process._SpawnedProcess if sys.argv[1] == "spawned" else process._ForkedProcess
    kind(target=target).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["forked", "forked twice", "spawned"])
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


THREAD = """
import threading
from troupe.workers.engine import process

threading.Thread(target=threading.Event().wait, daemon=True).start()
process.fork_server()
"""


def test_a_process_with_threads_is_not_forked() -> None:
    done = subprocess.run([sys.executable, "-c", THREAD], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "RuntimeError: a process with 1 more threads cannot be forked" in done.stderr

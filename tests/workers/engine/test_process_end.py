"""An engine's process says how it ended where its worker's errors are read, whatever has ended it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from troupe.workers.preload.server import _WITHOUT_THREADS

SCRIPT = """
import ctypes, json, os, signal, sys
from types import SimpleNamespace
from troupe.workers.engine import process
from troupe.workers.engine.errors import engine_dead

def raises(error):
    raise error

ENDS = {
    "abort": lambda: ctypes.CDLL(None).abort(),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "error": lambda: raises(ValueError("it is broken")),
    "memory": lambda: raises(MemoryError()),
}

def end(how):
    os.write(2, b"loading\\n")
    ENDS[how]()

if __name__ == "__main__":
    sys.modules["torch"] = SimpleNamespace(get_num_threads=lambda: 1)  # takes seconds to import
    os.environ[process.FOLDER_VARIABLE] = process.temporary_folder()
    process.fork_server()  # as in a fork of the server of workers, before Ray redirects its streams
    found = {}
    for how in ENDS:
        for descriptor in (1, 2):
            log = os.open(f"{sys.argv[1]}/{how}-{descriptor}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, descriptor)
        engine = process._ForkedProcess(target=end, args=(how,))
        engine.start()
        engine.join()
        found[how] = str(engine_dead("rollout-0", process.how_ended([engine])))
    with open(sys.argv[1] + "/found", "w") as file:
        json.dump(found, file)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error for an engine after each kind of end."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "script.py").write_text(SCRIPT)
    env = os.environ | _WITHOUT_THREADS | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "script.py"), str(folder)]
    with (folder / "node").open("w") as node:
        subprocess.run(command, cwd=ROOT, env=env, stdout=node, stderr=node, timeout=120, check=True)
    assert (folder / "node").read_text() == ""  # nobody would look there
    return json.loads((folder / "found").read_text())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("abort", "(SIGABRT); vLLM's last error: loading (Fatal Python error: Aborted); its log: "),
        ("SIGSEGV", "(SIGSEGV); vLLM's last error: Fatal Python error: Segmentation fault; its log: "),
        ("SIGKILL", "(SIGKILL); its last lines: loading; its log: "),
        ("exit", "(exit code 3); its last lines: loading; its log: "),
        ("error", "(exit code 1); vLLM's last error: ValueError: it is broken; its log: "),
        ("memory", "(exit code 1); vLLM's last error: MemoryError; its log: "),
    ],
)
def test_the_error_has_the_signal_and_the_end_of_log(found: dict[str, str], how: str, words: str) -> None:
    assert found[how].startswith("the engine process of rollout-0 has ended " + words)

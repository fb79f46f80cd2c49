"""Engines are forked from a process that has imported vLLM, with the environment of the one that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

CODE = """
import multiprocessing, os
from workers.engine import process

def told(pipe):
    pipe.send((os.environ.get("SET_LATER"), os.environ["SET_BEFORE"], os.getppid()))

if __name__ == "__main__":
    process._IMPORTED_AHEAD[:] = ["json.tool"]
    os.environ["SET_BEFORE"] = "old"
    process.import_ahead()
    os.environ |= {"SET_LATER": "1", "SET_BEFORE": "new"}
    here, there = multiprocessing.Pipe()
    child = process._Context().Process(target=told, args=(there,))
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

"""The script by which Ray's node starts workers does what Ray's script does, or leaves it to that one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from troupe.workers.preload import setup_worker

RECORD = "import json, os, sys; print(json.dumps([sys.argv, os.environ.get('A'), os.environ.get('B')]))"


def start(folder: Path, context: dict[str, object], language: str = "PYTHON") -> list[object]:
    """What the script that was started prints."""
    for name in ("worker.py", "setup_worker.py"):  # of Ray
        (folder / name).write_text(RECORD)
    arguments = [str(folder / "worker.py"), "--port=1", f"--serialized-runtime-env-context={json.dumps(context)}"]
    command = [sys.executable, setup_worker.__file__, *arguments, f"--language={language}", "--hash=2"]
    env = os.environ | {"A": "before", "HERE": "there"}
    return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_a_worker_has_its_environment_and_the_arguments_of_the_node(tmp_path: Path) -> None:
    found = start(tmp_path, {"env_vars": {"A": "1=2", "B": "${HERE}/$HERE${NOT_HERE}"}, "command_prefix": []})
    assert found == [[str(tmp_path / "worker.py"), "--port=1", "--hash=2"], "1=2", "there/there"]
    assert start(tmp_path, {})[1:] == ["before", None]


def test_a_worker_has_its_own_interpreter(tmp_path: Path) -> None:
    (tmp_path / "another one").write_text(f"#!{sys.executable}\n{RECORD}")
    (tmp_path / "another one").chmod(0o700)
    found = start(tmp_path, {"py_executable": shlex.join([str(tmp_path / "another one"), "-x y"])})
    assert found[0] == [str(tmp_path / "another one"), "-x y", str(tmp_path / "worker.py"), "--port=1", "--hash=2"]


@pytest.mark.parametrize(
    ("context", "language"),
    [({"command_prefix": ["cd /"]}, "PYTHON"), ({"override_worker_entrypoint": "x"}, "PYTHON"), ({}, "JAVA")],
)
def test_what_it_does_not_know_is_left_to_rays_script(
    tmp_path: Path, context: dict[str, object], language: str
) -> None:
    argv = start(tmp_path, context, language)[0]
    assert isinstance(argv, list) and argv[:2] == [str(tmp_path / "setup_worker.py"), str(tmp_path / "worker.py")]
    assert f"--language={language}" in argv and "--hash=2" in argv


@pytest.mark.parametrize("early", [False, True])
def test_a_worker_that_starts_ends_with_its_node(tmp_path: Path, early: bool) -> None:
    """Also where the node has ended before the script runs."""
    (tmp_path / "worker.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    command = [sys.executable, setup_worker.__file__, str(tmp_path / "worker.py"), "--language=PYTHON"]
    if early:
        env = os.environ | {"RAY_RAYLET_PID": "1" if os.getpid() != 1 else "2"}
        assert subprocess.run(command, env=env, capture_output=True, check=False, timeout=60).returncode == 1
        return
    node = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", node], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
        worker.wait(60)

"""Stacks of real processes, requested with SIGUSR1."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import suspend, wait_for_state
from troupe.orchestrator.cluster import stack_dumps
from troupe.orchestrator.cluster.inspection import InspectRequest, inspect_node
from troupe.orchestrator.cluster.stack_dumps import (
    parse_stacks,
    read_from_outside,
    read_stacks,
    request_stacks,
)
from troupe.workers.telemetry.stacks import LARGEST, VARIABLE, stack_file

INSTALL = "from troupe.workers.telemetry.stacks import write_stacks_on_signal; write_stacks_on_signal()\n"
BESIDE = "def beside():\n    time.sleep(60)\nthreading.Thread(target=beside, daemon=True).start()\n"
WAIT_S = 60.0


@contextmanager
def python(folder: Path, code: str, state: str | None = "S") -> Iterator[int]:
    """A process that runs `code`, says that it is ready by writing a file, and then has all threads in this state."""
    ready = folder / "ready"
    source = f"import pathlib\n{code.replace('READY', f'pathlib.Path({str(ready)!r}).touch()')}"
    script = folder / "stuck.py"
    script.write_text(source)
    env = os.environ | {VARIABLE: str(folder / "stacks"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], env=env) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            if state is not None:
                wait_for_state(process.pid, state)
            yield process.pid
        finally:
            process.kill()


def stacks_of(folder: Path, pid: int) -> list[str]:
    """Functions of the innermost frames of all threads."""
    asked = request_stacks(folder / "stacks", [pid])
    threads = read_stacks(folder / "stacks", asked, time.monotonic() + WAIT_S).get(pid, ())
    return [thread.frames[0].function for thread in threads]


def seen_from_outside(pid: int) -> list[str]:
    """Functions of the innermost frames of all threads."""
    return [thread.frames[0].function for thread in read_from_outside(pid)]


def test_a_process_that_holds_the_interpreter_lock_writes_its_stacks(tmp_path: Path) -> None:
    code = INSTALL + "import re\ndef stuck():\n    READY\n    re.match(r'(a+)+$', 'a' * 60 + 'b')\nstuck()\n"
    deadline, source = time.monotonic() + WAIT_S, ""
    with python(tmp_path, code, "R") as pid:
        while not source.startswith("re.match") and time.monotonic() < deadline:  # it is there some moments after READY
            asked = request_stacks(tmp_path / "stacks", [pid])
            (thread,) = read_stacks(tmp_path / "stacks", asked, deadline)[pid]
            frame = thread.innermost("user")
            source = "" if frame is None else f"{frame.source} in {frame.function}"
    assert source == "re.match(r'(a+)+$', 'a' * 60 + 'b') in stuck"


def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    code = (
        f"import os, time\n{INSTALL}child = os.fork()\nif child == 0:\n    {INSTALL}"
        "    def below():\n        pathlib.Path('CHILD').write_text(str(os.getpid()))\n        READY\n"
        "        time.sleep(60)\n    below()\ntime.sleep(60)\n"
    ).replace("CHILD", str(tmp_path / "child"))
    with python(tmp_path, code) as pid:
        child = int((tmp_path / "child").read_text())
        try:
            wait_for_state(child, "S")
            assert stacks_of(tmp_path, child) == ["below"]
            assert stacks_of(tmp_path, pid) == ["<module>"]
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_without_the_handler_is_not_signalled(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    with python(tmp_path, "import time\nREADY\ntime.sleep(60)\n") as pid:
        stack_file(tmp_path / "stacks", pid).touch()  # even where a file has its number
        assert request_stacks(tmp_path / "stacks", [pid]) == {}
        assert Path(f"/proc/{pid}").exists()


def test_a_stopped_process_is_not_signalled(tmp_path: Path) -> None:
    """The signal would wait until it continues, when the handler could crash it."""
    with python(tmp_path, f"import threading, time\n{INSTALL}{BESIDE}READY\ntime.sleep(60)\n") as pid:
        assert stacks_of(tmp_path, pid) == ["beside", "<module>"]
        suspend(psutil.Process(pid))
        assert request_stacks(tmp_path / "stacks", [pid]) == {}
        assert seen_from_outside(pid) in ([], ["beside", "<module>"])  # where py-spy may look


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_whose_threads_may_change_their_frames_is_not_signalled(tmp_path: Path, threads: int) -> None:
    """The handler could crash it, also where two threads hand the interpreter lock to each other."""
    code = f"import sys, threading, time\nsys.setswitchinterval(1e-4)\n{INSTALL}"
    code += "def beside():\n    while True:\n        pass\n"
    code += f"for _ in range({threads}):\n    threading.Thread(target=beside, daemon=True).start()\n"
    code += "READY\ntime.sleep(60)\n"
    with python(tmp_path, code, state=None) as pid:
        asked = [request_stacks(tmp_path / "stacks", [pid]) for _ in range(20)]
        assert asked == [{}] * 20
        found = seen_from_outside(pid)
        assert found in ([], ["beside"] * threads + ["<module>"])


def test_threads_that_ran_between_two_looks_are_not_taken_for_sleeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was seen asleep while the other one ran."""
    real = stack_dumps._status
    slept = itertools.count()
    with python(tmp_path, f"import threading, time\n{INSTALL}{BESIDE}READY\ntime.sleep(60)\n") as pid:
        handing_over = lambda path: real(path) | {"voluntary_ctxt_switches": str(next(slept))}  # noqa: E731
        monkeypatch.setattr(stack_dumps, "_status", handing_over)
        assert request_stacks(tmp_path / "stacks", [pid]) == {}
        monkeypatch.setattr(stack_dumps, "_status", real)
        assert list(request_stacks(tmp_path / "stacks", [pid])) == [pid]


def test_a_file_is_emptied_before_it_grows_too_large(tmp_path: Path) -> None:
    with python(tmp_path, f"import time\n{INSTALL}READY\ntime.sleep(60)\n") as pid:
        path = stack_file(tmp_path / "stacks", pid)
        path.write_bytes(b"x" * (LARGEST + 1))
        assert stacks_of(tmp_path, pid) == ["<module>"]
        assert path.stat().st_size < LARGEST


def test_threads_are_told_apart_and_unknown_lines_are_ignored() -> None:
    text = (
        'Thread 0x00007f1 (most recent call first):\n  File "/a.py", line 3 in f\n  File "/b.py", line ??? in g\n\n'
        'Current thread 0x00007f2 (most recent call first):\n  ...\n  File "/c d.py", line 1 in <module>\n'
    )
    first, main = parse_stacks(text)
    assert [(frame.file, frame.line) for frame in first.frames] == [("/a.py", 3), ("/b.py", 0)]
    assert main.frames[0].file == "/c d.py"


def test_a_look_tells_what_each_process_does(tmp_path: Path) -> None:
    code = f"import os\n{INSTALL}os.mkfifo('FIFO')\nREADY\nopen('FIFO', 'w')\n"
    fifo = tmp_path / "fifo"
    loop_forever = [sys.executable, "-c", "while True: pass"]
    with python(tmp_path, code.replace("FIFO", str(fifo))) as pid, subprocess.Popen(loop_forever) as busy:
        report = inspect_node(
            InspectRequest({pid: "policy-0", busy.pid: "reward-0"}, tmp_path / "stacks", paths=(tmp_path,))
        )
        suspend(psutil.Process(busy.pid))
        (stopped,) = inspect_node(InspectRequest({busy.pid: "reward-0"}, tmp_path / "stacks")).processes
        busy.kill()
    writer, loop = report.processes
    assert writer.threads[-1].frames[0].source == f"open('{fifo}', 'w')"
    assert writer.cpu < loop.cpu
    assert stopped.state == "T"
    assert [thread.frames[-1].function for thread in stopped.threads] in ([], ["<module>"])  # where py-spy may look
    assert report.node.disks[0][0] == str(tmp_path)


def test_a_process_without_a_folder_writes_beside_the_log_of_its_ray_worker(tmp_path: Path) -> None:
    log = tmp_path / "worker-1-2-3.err"
    code = f"{INSTALL}import os; print(os.environ[{VARIABLE!r}])"
    env = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(ROOT)}
    with log.open("wb") as stream:
        done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=stream, check=True)
    assert done.stdout.decode().strip() == str(tmp_path / "stacks")
    assert len(list((tmp_path / "stacks").iterdir())) == 1

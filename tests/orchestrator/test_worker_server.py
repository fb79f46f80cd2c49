"""Workers are forked from one process that has imported what they import; without it they start alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from troupe.orchestrator.cluster import worker_server
from troupe.orchestrator.cluster.worker_server import WorkerServer, _ahead, server_of, started_ahead
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.contract.config import EngineProcess
from troupe.workers.preload import forked_worker
from troupe.workers.preload import server as preload
from troupe.workers.preload.forked_worker import ENGINE_VARIABLE, EXIT_CODES, REPLY, SERVER_VARIABLE

ENGINE = EngineProcess(device="cpu", threads=2, enforce_eager=True)
SCRIPT = """
import json, multiprocessing, os, signal, sys
from pathlib import Path
from troupe.workers.engine import process

def told(pipe):
    torch = sys.modules["torch"]
    openmp = [line for line in torch.__config__.parallel_info().splitlines() if "omp_get_max_threads" in line]
    pipe.send(["vllm.v1.worker.cpu_worker" in sys.modules, torch.get_num_threads(), openmp[0].split()[-1]])

if __name__ == "__main__":
    found = {"argv": sys.argv[1:], "imported": "vllm.v1.engine.async_llm" in sys.modules}
    if found["imported"] and "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    found |= {"group": os.getpgid(0) == os.getpid(), "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:3]}
    if found["imported"]:
        found |= {"threads": sys.modules["torch"].get_num_threads(), "left": "TROUPE_ONLY_HERE" in os.environ}
    if found["imported"] and "engine" in sys.argv:
        here, there = multiprocessing.Pipe()
        child = process._ForkedProcess(target=told, args=(there,))
        child.start()
        found["engine"] = here.recv()
        child.join()
    Path(sys.argv[-1]).write_text(json.dumps(found))
"""
WHOLE = b'{"argv": [], "environment": {}, "folder": "/"}'
LOST = "the process that workers are forked from {}: they start without it, more slowly"
DYING = """
import ctypes, os, signal, sys
from pathlib import Path
from troupe.workers.preload.forked_worker import serves

deaths = {
    "abort": ctypes.CDLL(None).abort,
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "raise": lambda: {}["missing"],
}
Path(sys.argv[-1]).write_text(f"[{os.getpid()}, {os.getppid()}]")
serves()
deaths[sys.argv[1]]()
"""
SERVING = """
import sys
from pathlib import Path
from troupe.workers.preload.forked_worker import serves

with Path(sys.argv[-1]).open("a") as lines:
    lines.write("a worker\\n")
serves()
"""
STOPPED_ONCE = """
import os, signal, sys
from pathlib import Path

mark = Path(sys.argv[-1]).with_name("stopped")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
Path(sys.argv[-1]).write_text("1")
"""
CONNECTING = """
import os, sys, time
from pathlib import Path

Path(sys.argv[-1]).write_text(str(os.getpid()))
time.sleep(600)
"""
IMPORT = """
import pathlib, time

(pathlib.Path(__file__).parent.parent / "begun").touch()
while True:
    time.sleep(0.1)
"""


def start(
    server: WorkerServer, folder: Path, engine: EngineProcess | None, *arguments: str, script: str = SCRIPT
) -> subprocess.Popen[str]:
    """Ray's node starts a worker, whose result will be in `folder / "result"`."""
    (folder / "result").unlink(missing_ok=True)
    (folder / "script.py").write_text(script)
    asked = {SERVER_VARIABLE: server.path, ENGINE_VARIABLE: "" if engine is None else engine.model_dump_json()}
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1" if engine is None else "2"} | asked
    command = [sys.executable, forked_worker.__file__, str(folder / "script.py"), *arguments, str(folder / "result")]
    return subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def result(folder: Path, timeout_s: float = 60.0) -> dict[str, object]:
    deadline = time.monotonic() + timeout_s
    while not (folder / "result").exists() or not (text := (folder / "result").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return json.loads(text)


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerServer]:
    """A server whose import takes as long as the test."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    server = WorkerServer(ENGINE)
    while not (tmp_path / "begun").exists():
        assert server._process.poll() is None
        time.sleep(0.05)
    yield server
    server._process.kill()
    server._process.wait()


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerServer]:
    """A server that serves at once, as it imports nothing."""
    monkeypatch.setattr(worker_server, "_ENTRY", "tests.orchestrator.light_server:serve")
    server = WorkerServer(ENGINE, stopped_s=1.0)
    yield server
    server.close()


def dies(server: WorkerServer, folder: Path, death: str) -> int:
    """Start a worker that dies when it serves; returns its process id, and fails if the server has not forked it."""
    assert start(server, folder, None, death, script=DYING).wait(60) == 0
    pid, parent = json.loads((folder / "result").read_text())
    assert parent == server._process.pid
    return pid


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def half_sent(server: WorkerServer) -> socket.socket:
    """A connection on which half a request has arrived, with descriptors."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server.path)
    socket.send_fds(connection, [WHOLE[:9]], [0, 1, 2])
    return connection


def descriptors(server: WorkerServer) -> int:
    return len(os.listdir(f"/proc/{server._process.pid}/fd"))


@pytest.mark.parametrize(
    ("death", "code"), [("abort", -6), ("SIGSEGV", -11), ("SIGKILL", -9), ("exit", 3), ("raise", 1)]
)
def test_the_exit_code_of_a_worker_is_known(serving: WorkerServer, tmp_path: Path, death: str, code: int) -> None:
    """Also after the server has ended; its last worker may be a zombie until then."""
    pid = dies(serving, tmp_path, death)
    until(lambda: serving.exit_code(pid) is not None)
    assert serving.exit_code(pid) == code
    assert serving.exit_code(os.getpid()) is None
    serving._process.kill()
    serving._process.wait()
    assert serving.exit_code(pid) == code


def test_the_exit_code_of_a_worker_that_is_ending_is_waited_for(
    serving: WorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections close first, and the server records and reaps it between two looks."""
    looks = iter((["R"], ["R"], []))

    def stat_fields(pid: int) -> list[str]:
        if not (fields := next(looks)):
            (Path(serving.path).parent / EXIT_CODES).write_text(f"{pid} -9\n")
        return fields

    monkeypatch.setattr(worker_server, "exit_code", lambda pid: None)
    monkeypatch.setattr(worker_server, "stat_fields", stat_fields)
    assert serving.exit_code(123456) == -9


def test_half_a_request_makes_no_other_one_wait(serving: WorkerServer, tmp_path: Path) -> None:
    """Nor do more of them than the server holds, and none of them is forked when it is cut."""
    dies(serving, tmp_path, "exit")
    before = descriptors(serving)
    halves = [half_sent(serving) for _ in range(2 * preload._MOST_ASKING)]
    dies(serving, tmp_path, "exit")
    for half in halves:
        half.close()
    until(lambda: descriptors(serving) == before)
    dies(serving, tmp_path, "exit")


def test_a_request_that_never_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_ASK_S", 0.0)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        socket.send_fds(there, [WHOLE[:9]], [0, 1, 2])
        assert preload._attend(preload._PendingFork(here))


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\xff",
        b"[1]",
        b"[" * 100_000,
        b'{"argv": []}',
        b'{"argv": 1, "environment": {}, "folder": "/"}',
        b'{"argv": [1], "environment": {}, "folder": "/"}',
        b'{"argv": [], "environment": {"A": 1}, "folder": "/"}',
        b'{"argv": [], "environment": [], "folder": "/"}',
    ],
    ids=lambda text: text[:44].decode(errors="replace"),
)
def test_a_request_of_another_shape_is_dropped(monkeypatch: pytest.MonkeyPatch, request_: bytes) -> None:
    """Its descriptors are closed."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    here, there = socket.socketpair(socket.AF_UNIX)
    before = os.listdir("/proc/self/fd")
    with here, there:
        asking = preload._PendingFork(here)
        socket.send_fds(there, [request_ or b" "], [0, 1, 2])
        while not preload._attend(asking):
            there.shutdown(socket.SHUT_WR)
        there.close()
        asking.close()
    assert len(os.listdir("/proc/self/fd")) == len(before) - 2


def test_a_request_without_streams_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        asking = preload._PendingFork(here)
        there.sendall(WHOLE)
        there.shutdown(socket.SHUT_WR)
        assert [preload._attend(asking), preload._attend(asking)] == [False, True]


def test_a_stopped_server_is_ended_and_named_once(
    serving: WorkerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker that has asked meanwhile starts alone, and so do later ones, at once."""
    serving._process.send_signal(signal.SIGSTOP)
    for _ in range(2):
        assert start(serving, tmp_path, None, "plain").wait(30) == 0
        assert result(tmp_path)["argv"] == ["plain", str(tmp_path / "result")]
    serving._watch.join(60)
    assert caplog.messages == [LOST.format("was stopped for 1 s (failures.stopped_s)")]


def test_a_server_that_is_killed_when_it_has_forked_leaves_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that asked for it does not become a second one."""
    monkeypatch.setattr(worker_server, "_ENTRY", "tests.orchestrator.light_server:serve_once")
    server = WorkerServer(ENGINE)
    assert start(server, tmp_path, None, script=SERVING).wait(60) == 0
    assert (tmp_path / "result").read_text() == "a worker\n"
    server.close()


def test_a_fork_that_is_stopped_before_ray_knows_it_is_started_again(
    serving: WorkerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray itself would wait for a minute and a half. The server goes on."""
    assert start(serving, tmp_path, None, script=STOPPED_ONCE).wait(30) == 0
    assert result(tmp_path) == 1
    assert caplog.messages == ["a worker was stopped while it started, for 1 s (failures.stopped_s): again"]
    dies(serving, tmp_path, "exit")


def test_a_fork_that_ray_does_not_know_yet_ends_with_its_node(
    serving: WorkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself tries to connect to a head that is gone for half a minute."""
    with subprocess.Popen(["sleep", "600"]) as node:
        monkeypatch.setenv("RAY_RAYLET_PID", str(node.pid))
        asked = start(serving, tmp_path, None, script=CONNECTING)
        fork = psutil.Process(int(str(result(tmp_path))))
        node.kill()
        node.wait()
        fork.wait(60)
        asked.kill()
        asked.wait()


@pytest.mark.parametrize("when", ["imports", "serves"])
def test_what_a_killed_server_has_written_is_not_the_reason(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    server: WorkerServer = request.getfixturevalue("importing" if when == "imports" else "serving")
    with server._errors.open("a") as errors:
        errors.write("ImportError: something that another package did without\n")
    server._process.kill()
    server._watch.join(60)
    assert caplog.messages == [LOST.format("has ended (SIGKILL)")]


def test_a_server_that_does_not_answer_costs_one_wait(
    importing: WorkerServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that has waited starts alone and removes the socket; the server is ended and named."""
    monkeypatch.setattr(forked_worker, "IMPORTS_S", 0.1)
    monkeypatch.setenv(SERVER_VARIABLE, importing.path)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    for _ in range(2):
        forked_worker.main(["script.py"])
    assert started == [[sys.executable, "script.py"]] * 2
    importing._watch.join(60)
    assert importing._process.poll() == -signal.SIGKILL
    assert caplog.messages == [LOST.format("did not answer within 40 s")]


@pytest.mark.parametrize(("address", "variable"), [("host:6379", None), (None, "host:6379")])
def test_the_workers_of_a_cluster_that_is_joined_are_started_by_ray(
    monkeypatch: pytest.MonkeyPatch, address: str | None, variable: str | None
) -> None:
    """They have the environment of their node, and do not end with what a job's command has started."""
    spec = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml")
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert server_of(spec, address) is None
    with started_ahead(spec, address):
        assert _ahead == {}


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_forked_for_a_worker_that_has_waited_too_long(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """It has started without a fork: there would be two of it."""
    forks: list[int] = []
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or 1)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        socket.send_fds(there, [WHOLE], [0, 1, 2])
        there.shutdown(socket.SHUT_WR)
        asking = preload._PendingFork(here)
        assert not preload._attend(asking)  # more may come
        if not waits:
            there.close()
        assert preload._attend(asking)
        assert forks == [1] * waits


@pytest.mark.parametrize(("forks", "serves"), [(True, True), (True, False), (False, False)])
def test_who_asks_for_a_worker_waits_until_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool, serves: bool
) -> None:
    """The fork answers when it begins, and when it serves; one that is killed before closes."""
    monkeypatch.setenv(SERVER_VARIABLE, str(tmp_path / "workers"))
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(str(tmp_path / "workers"))
        listener.listen()
        asking = threads.submit(forked_worker._fork, ["script.py"])
        connection, _ = listener.accept()
        received = preload._PendingFork(connection)
        while (request := received.request()) is None:
            time.sleep(0.01)
        for descriptor in received.descriptors:
            os.close(descriptor)
        assert request.argv == ["script.py"]
        if forks:
            connection.sendall(REPLY)
        if serves:
            monkeypatch.setattr(forked_worker, "waiting", [connection])
            forked_worker.serves()
        connection.close()
        assert asking.result(60) is serves


@pytest.mark.real
def test_workers_are_forks_that_have_imported_everything_and_an_engine_is_a_fork_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed before it serves is started without a fork, at once."""
    monkeypatch.setenv("TROUPE_ONLY_HERE", "1")
    server = WorkerServer(ENGINE)
    monkeypatch.delenv("TROUPE_ONLY_HERE")
    try:
        for name, engine in (("plain", None), ("engine", ENGINE)):
            folder = tmp_path / name
            folder.mkdir()
            assert start(server, folder, engine, name).wait(240) == 0
            found = result(folder)
            assert found.pop("engine", None) == ([True, 2, "2"] if engine else None)
            assert found == {
                "argv": [name, str(folder / "result")],
                "imported": True,
                "group": True,
                "descriptors": ["0", "1", "2"],
                "threads": 2 if engine else 1,
                "left": False,
            }
        killed = tmp_path / "killed"
        killed.mkdir()
        assert start(server, killed, None, "killed").wait(240) == 0
        assert result(killed)["imported"] is False  # the process that asked has become the worker
        assert server._process.poll() is None
    finally:
        server.close()
    assert not Path(server.path).exists()


def test_a_worker_starts_alone_when_the_server_is_killed_while_it_imports(
    importing: WorkerServer, tmp_path: Path
) -> None:
    worker = start(importing, tmp_path, None, "plain")
    importing._process.send_signal(signal.SIGKILL)
    assert worker.wait(60) == 0
    found = result(tmp_path)
    assert (found["argv"], found["imported"]) == (["plain", str(tmp_path / "result")], False)


def test_a_worker_starts_alone_when_the_server_is_gone(importing: WorkerServer, tmp_path: Path) -> None:
    importing.close()
    worker = start(importing, tmp_path, None, "plain")
    assert worker.wait(60) == 0 and worker.stderr is not None
    assert "the worker is not forked: " in worker.stderr.read()
    assert result(tmp_path)["imported"] is False


def test_a_server_that_has_failed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers start without it, and nothing else shows that they took longer."""
    (tmp_path / "vllm.py").write_text("raise RuntimeError('it is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    server = WorkerServer(ENGINE)
    assert server._process.wait(60) == 1
    server.close()
    assert caplog.messages == [LOST.format("has ended (exit code 1: RuntimeError: it is broken)")]


def test_a_server_that_imports_ends_with_the_command_that_has_started_it(tmp_path: Path) -> None:
    """Also by kill -9, and its folder goes."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(IMPORT)
    code = (
        "import sys, time; from troupe.orchestrator.cluster.worker_server import WorkerServer; "
        "from troupe.workers.contract.config import EngineProcess; "
        f"server = WorkerServer(EngineProcess.model_validate_json({ENGINE.model_dump_json()!r})); "
        "print(server._process.pid, server.path, flush=True); time.sleep(600)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    pid, path = command.stdout.readline().split()
    server = psutil.Process(int(pid))
    try:
        while not (tmp_path / "begun").exists():
            assert server.is_running() and server.status() != psutil.STATUS_ZOMBIE
            time.sleep(0.05)
        command.kill()
        command.wait()
        server.wait(60)
        deadline = time.monotonic() + 60
        while Path(path).parent.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        command.kill()
        if server.is_running():
            server.kill()

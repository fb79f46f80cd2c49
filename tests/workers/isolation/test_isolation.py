"""Processes of user code: bounded output, no descendant that outlives them, bounded memory, no secrets, clean text."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.text import LONGEST_LINE, is_secret, one_line
from troupe.workers.isolation.child import OUTPUT_LIMIT, BoundedOutput
from troupe.workers.isolation.descendants import MARK, child_environment, end_marked, marked, new_mark
from troupe.workers.rewards.runner import RewardProcess, RewardResult, Sample

HERE = "tests.workers.isolation.misbehaving"


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[RewardProcess]:
    """A process with the function that the test names, on a tight time limit."""
    name, *env = request.param if isinstance(request.param, tuple) else (request.param,)
    config = RewardFunctionConfig(name=f"{HERE}:{name}", timeout_s=20.0 if name == "grows" else 5.0, env=tuple(env))
    running = RewardProcess(config, memory_limit_mib=256)
    yield running
    running.close()


def score(process: RewardProcess, response: str = "x") -> RewardResult:
    """The outcome of one sample."""
    return process.score([Sample(response, "", "{}", 1, "stop")])[0]


def mark_of(process: RewardProcess) -> str:
    """The mark of the child that runs now."""
    return process._child.mark if process._child else ""


def gone(mark: str) -> bool:
    """Whether no process with the mark is left, after at most some seconds."""
    deadline = time.monotonic() + 20
    while (left := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


@pytest.mark.parametrize("process", ["talks"], indirect=True)
def test_endless_output_is_cut_and_the_function_goes_on(process: RewardProcess, tmp_path: Path) -> None:
    """The log gets a MiB of 64, and the function is not blocked by a full pipe."""
    log = (tmp_path / "log").open("wb")
    with log:
        here = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            outcomes = [score(process), score(process)]
            process.close()
        finally:
            os.dup2(here, 2)
            os.close(here)
    assert outcomes == [RewardResult(1.0)] * 2
    assert OUTPUT_LIMIT <= (tmp_path / "log").stat().st_size < OUTPUT_LIMIT + 4096


@pytest.mark.parametrize("process", ["leaves"], indirect=True)
@pytest.mark.parametrize(
    ("response", "status"), [("hangs", "timeout after 5 s"), ("exits", "died with exit code 3"), ("returns", "ok")]
)
def test_what_a_function_has_started_ends_with_it(process: RewardProcess, response: str, status: str) -> None:
    """Processes of their own session, with another parent: none is left once the child has ended."""
    process.start()
    mark = mark_of(process)
    assert score(process, response).status == status
    if response == "returns":
        assert len(list(marked(mark))) >= 3  # the child, and what it has left behind, which a later call may use
        process.close()
    assert list(marked(mark)) == []


PARENT = """
import sys, time
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.runner import RewardProcess, Sample
process = RewardProcess(RewardFunctionConfig(name=sys.argv[1], timeout_s=60.0), 256)
process.score([Sample("returns", "", "{}", 1, "stop")])
print(process._child.mark, flush=True)
time.sleep(600)
"""


def test_what_a_function_has_started_ends_with_the_worker_that_is_killed() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{HERE}:leaves"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    mark = worker.stdout.readline().strip()
    assert len(list(marked(mark))) >= 3
    worker.kill()
    worker.wait()
    assert gone(mark)


def test_a_function_that_kills_its_parent_fails_its_sample_and_nothing_else() -> None:
    """The worker, in a separate process group, is not that parent: it scores the next sample, and nothing is left."""
    killed = "died with signal 9 (Killed)"
    expected = {"parent 9": killed, "group 9": killed, "parent 15": "ok", "group 1": "ok"}
    worker = subprocess.run(
        [sys.executable, "-c", SCORES, f"{HERE}:kills", *expected],
        cwd=ROOT,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    assert (worker.returncode, worker.stdout.splitlines()) == (0, [*expected.values(), "0"]), worker


SCORES = """
import sys
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.isolation.descendants import marked
from troupe.workers.rewards.runner import RewardProcess, Sample
process = RewardProcess(RewardFunctionConfig(name=sys.argv[1], timeout_s=60.0), 256)
for response in sys.argv[2:]:
    print(process.score([Sample(response, "", "{}", 1, "stop")])[0].status, flush=True)
mark = process._child.mark
process.close()
print(len(list(marked(mark))))
"""


RESERVES = """
import mmap
from troupe.workers.isolation.inside import limit_memory
limit_memory(64)
reserved = mmap.mmap(-1, 2**38, flags=mmap.MAP_PRIVATE, prot=0)
for size in (32, 128):
    try:
        print(len(bytearray(size * 2**20)) >> 20)
    except MemoryError:
        print("MemoryError")
"""


def test_addresses_that_a_program_only_reserves_are_no_memory() -> None:
    """Node.js, Java and CUDA reserve more of them than any machine has memory."""
    done = subprocess.run([sys.executable, "-c", RESERVES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["32", "MemoryError"], done.stderr


@pytest.mark.parametrize("process", ["grows"], indirect=True)
def test_memory_counts_over_all_processes_of_a_function(process: RewardProcess) -> None:
    """Four processes of 100 MiB are more than 256 MiB, though none of them is."""
    process.start()
    mark = mark_of(process)
    status = score(process).status
    assert status.partition(": ")[2].startswith("out of memory (limit 256 MiB; ") and status.endswith(" MiB more)"), (
        status
    )
    assert gone(mark)


@pytest.mark.parametrize("process", ["forks"], indirect=True)
def test_memory_that_forked_processes_share_counts_once(process: RewardProcess) -> None:
    """Four processes share 150 MiB of 256, which each has in its resident set."""
    assert score(process).status == "ok"


@pytest.mark.parametrize("process", ["reads", ("reads", "MY_API_KEY")], indirect=True)
def test_secrets_are_not_passed_on_unless_they_are_named(
    process: RewardProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MY_API_KEY", "HF_TOKEN", "PLAIN"):
        monkeypatch.setenv(name, "x")
    named = float("MY_API_KEY" in process.config.env)
    assert [score(process, name).value for name in ("MY_API_KEY", "HF_TOKEN", "PLAIN")] == [named, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(("HF_TOKEN", True), ("WANDB_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True), ("PGPASSWORD", True)),
        *(("GITHUB_TOKEN", True), ("token", True), ("GOOGLE_APPLICATION_CREDENTIALS", True)),
        *(("AZURE_STORAGE_KEY", True), ("AZURE_STORAGE_CONNECTION_STRING", True), ("GITHUB_PAT", True)),
        *(("TOKENIZERS_PARALLELISM", False), ("PATH", False), ("OMP_NUM_THREADS", False), ("KEYBOARD", False)),
        *(("MONKEY", False), ("KEY_REPEAT", False), ("PATTERN", False)),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret
    assert (name in child_environment("m", of={name: "x"})) is not secret


@pytest.mark.parametrize("process", ["says"], indirect=True)
def test_what_an_exception_says_is_one_clean_line(process: RewardProcess) -> None:
    status = score(process).status
    assert status.startswith("error: ValueError: red long long")
    assert status.isprintable() and len(status) < LONGEST_LINE + 60


@given(st.text(max_size=2000))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert (line == "" or line.isprintable()) and len(line) <= LONGEST_LINE
    assert one_line(line) == line


@given(st.text(alphabet=st.characters(categories=["L", "N"]), min_size=1, max_size=LONGEST_LINE))
def test_words_stay_as_they_are(word: str) -> None:
    assert one_line(f" \x1b[31m{word}\x1b[0m\n") == word


def test_output_beyond_the_limit_is_discarded(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        output = BoundedOutput("a program", limit=8, log=log.fileno())
        done = subprocess.Popen([sys.executable, "-c", "print('first'); print('last words')"], stdout=output.descriptor)
        output.started()
        done.wait()
        output.drain(20)
    assert (tmp_path / "log").read_bytes() == b"first\nla"


def test_only_processes_with_the_mark_are_ended() -> None:
    mark, other = new_mark(), new_mark()
    sleepers = {
        name: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, MARK: name})
        for name in (mark, f"{mark}.7", f"{mark}7", other)
    }
    try:
        assert set(marked(mark)) == {sleepers[mark].pid, sleepers[f"{mark}.7"].pid}
        end_marked(mark)
        assert [sleepers[name].wait(20) for name in (mark, f"{mark}.7")] == [-9, -9]
        assert sleepers[other].poll() is None and sleepers[f"{mark}7"].poll() is None
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()


def test_what_is_being_read_is_forgotten_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    read, reading = os.read, threading.Event()

    def slow(descriptor: int, most: int) -> bytes:
        chunk = read(descriptor, most)
        if chunk == b"old\n":
            reading.set()
            time.sleep(0.1)
        return chunk

    monkeypatch.setattr(os, "read", slow)
    output = BoundedOutput("a program", log=None)
    writer = os.dup(output.descriptor)
    output.started()
    os.write(writer, b"old\n")
    assert reading.wait(10)
    output.forget()
    os.write(writer, b"new\n")
    os.close(writer)
    output.drain(10)
    assert output.lines() == ["new"]

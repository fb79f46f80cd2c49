"""The mailbox of a run: each request is taken once; neither a dead partner nor a hung disk blocks the other side."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.conftest import ROOT
from tests.faults.stalls import frozen, may_mount, own_disk
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.live.mailbox import LONGEST, Mailbox, PostedRequest, require_folder, run_in_child
from troupe.workers.contract.atomic_file import write_atomic

WAIT_S = 30.0


@contextmanager
def serving(folder: Path, handle: Callable[[PostedRequest], bytes]) -> Iterator[Mailbox]:
    """A run in another thread that answers every request."""
    mailbox, stop = Mailbox(folder), threading.Event()
    mailbox.open()

    def serve() -> None:
        while not stop.wait(0.002):
            for request in mailbox.take():
                mailbox.answer(request, handle(request))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield mailbox
    finally:
        stop.set()
        thread.join()


def messages(folder: Path) -> list[str]:
    """Names of the files in the folder."""
    return sorted(path.name for path in folder.iterdir())


def process(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process with an open mailbox that runs `code`."""
    start = f"from troupe.orchestrator.live.mailbox import Mailbox\nmailbox = Mailbox(Path({str(folder)!r}))\n"
    command = [sys.executable, "-c", f"import os, sys, time\nfrom pathlib import Path\n{start}{code}"]

    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_every_command_gets_the_answer_to_its_own_request(tmp_path: Path) -> None:
    contents = [str(number).encode() * number for number in range(8)]
    answers: dict[bytes, bytes] = {}
    with serving(tmp_path / "box", lambda request: b"answer to " + (request.content or b"")) as mailbox:
        threads = [
            threading.Thread(target=lambda c=content: answers.update({c: mailbox.ask(c, WAIT_S)}))
            for content in contents
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {content: b"answer to " + content for content in contents}
    wait_for(lambda: messages(tmp_path / "box") == [])


def test_the_folder_and_the_messages_are_private(tmp_path: Path) -> None:
    seen: list[str] = []
    folder = tmp_path / "box"

    def look(request: PostedRequest) -> bytes:
        mailbox.answer(PostedRequest("other", None), b"")
        seen.append(oct((folder / "answer-other").stat().st_mode & 0o777))
        return b""

    with serving(folder, look) as mailbox:
        mailbox.ask(b"", WAIT_S)
    assert (oct(folder.stat().st_mode & 0o777), seen) == ("0o700", ["0o600"])


def test_a_request_that_is_too_long_is_cut_and_one_that_cannot_be_read_is_taken(tmp_path: Path) -> None:
    for key, length in (("a", LONGEST), ("b", 10 * LONGEST)):
        (tmp_path / f"request-{key}").write_bytes(bytes(length))
    (tmp_path / "request-c").symlink_to("nowhere")
    longest, too_long, unreadable = Mailbox(tmp_path).take()
    assert (longest.content, longest.too_long) == (bytes(LONGEST), False)
    assert (len(too_long.content or b""), too_long.too_long) == (LONGEST + 1, True)
    assert (unreadable.content, unreadable.too_long) == (None, False)
    assert messages(tmp_path) == []


def test_a_request_that_fails_leaves_the_next_ones_for_later(tmp_path: Path) -> None:
    for key in "abc":
        (tmp_path / f"request-{key}").touch()
    mailbox = Mailbox(tmp_path)
    assert [next(mailbox.take()).key, [request.key for request in mailbox.take()]] == ["a", ["b", "c"]]


def test_a_command_that_gives_up_withdraws_its_request(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        Mailbox(tmp_path).ask(b"too late", 0.2)
    wait_for(lambda: messages(tmp_path) == [])


def test_an_interrupted_command_withdraws_its_request(tmp_path: Path) -> None:
    with process(tmp_path, "mailbox.ask(b'', 60)") as command:
        wait_for(lambda: any(tmp_path.glob("request-*")))
        command.send_signal(signal.SIGINT)
        command.wait(WAIT_S)
    wait_for(lambda: messages(tmp_path) == [])


def test_an_answer_that_comes_too_late_stays_until_the_next_run(tmp_path: Path) -> None:
    mailbox, taken = Mailbox(tmp_path), list[PostedRequest]()

    def take() -> None:
        wait_for(lambda: any(tmp_path.glob("request-*")))
        taken.extend(mailbox.take())

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(TimeoutError):
        mailbox.ask(b"", 2.0, WAIT_S)
    thread.join()
    wait_for(lambda: messages(tmp_path) == [])
    mailbox.answer(taken[0], b"too late")
    assert messages(tmp_path) == [f"answer-{taken[0].key}"]
    mailbox.open()
    assert messages(tmp_path) == []


def test_a_run_that_dies_with_a_request_ends_the_wait_at_its_bound(tmp_path: Path) -> None:
    code = "print(flush=True)\nwhile not list(mailbox.take()): time.sleep(0.002)\nos.kill(os.getpid(), 9)"
    with process(tmp_path, code) as run:
        assert run.stdout is not None and run.stdout.readline()
        with pytest.raises(TimeoutError):
            Mailbox(tmp_path).ask(b"", 2.0, WAIT_S)
        assert run.wait(WAIT_S) == -signal.SIGKILL  # it took the request
    wait_for(lambda: messages(tmp_path) == [])


def test_a_folder_that_disappears_ends_the_wait_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    folder.mkdir()

    def remove() -> None:
        wait_for(lambda: any(folder.glob("request-*")))
        shutil.rmtree(folder)

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(FileNotFoundError):
        Mailbox(folder).ask(b"", 60.0)
    thread.join()
    with pytest.raises(FileNotFoundError):
        Mailbox(folder).ask(b"", 60.0)


def test_an_answer_is_read_when_it_is_whole(tmp_path: Path) -> None:
    whole = b"x" * 100_000

    def slowly() -> None:
        wait_for(lambda: any(tmp_path.glob("request-*")))
        (request,) = tmp_path.glob("request-*")
        unfinished = tmp_path / f".{request.name.replace('request', 'answer')}.17"
        unfinished.write_bytes(whole[:10])
        time.sleep(0.3)
        unfinished.write_bytes(whole)
        unfinished.rename(tmp_path / request.name.replace("request", "answer"))

    thread = threading.Thread(target=slowly)
    thread.start()
    assert Mailbox(tmp_path).ask(b"", WAIT_S) == whole
    thread.join()


def test_processes_that_ask_at_once_get_their_own_answers(tmp_path: Path) -> None:
    code = "print(all(mailbox.ask(f'{who} {n}'.encode(), 60.0) == f'{who} {n}'.encode() for n in range(5)))"
    asked: list[bytes] = []

    def reply(request: PostedRequest) -> bytes:
        asked.append(request.content or b"")
        return asked[-1]

    with serving(tmp_path, reply):
        commands = [process(tmp_path, f"who = {who!r}\n{code}") for who in "abc"]
        assert [command.communicate(timeout=60)[0].strip() for command in commands] == ["True"] * 3
    assert sorted(asked) == [f"{who} {n}".encode() for who in "abc" for n in range(5)]
    wait_for(lambda: messages(tmp_path) == [])


def test_each_of_many_requests_is_taken_by_one_of_several_processes(tmp_path: Path) -> None:
    code = "print('ready', flush=True)\nwhile not Path('STOP').exists():\n".replace("STOP", str(tmp_path / "stop"))
    code += "    for request in mailbox.take():\n        print(request.key, request.content.decode())\n"
    folder = tmp_path / "box"
    Mailbox(folder).open()
    runs = [process(folder, code) for _ in range(3)]
    for run in runs:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
    wanted = {f"{number:03} {number}" for number in range(300)}
    for line in sorted(wanted):
        key, content = line.split()
        write_atomic(folder / f"request-{key}", content)
    wait_for(lambda: not messages(folder))
    (tmp_path / "stop").touch()
    taken = [line for run in runs for line in run.communicate(timeout=WAIT_S)[0].splitlines()]
    assert len(taken) == 300 and set(taken) == wanted


def test_a_request_that_another_process_deletes_first_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path, missing_ok: bool = False) -> None:
        unlink(path)  # the other process
        unlink(path, missing_ok)

    (tmp_path / "request-a").touch()
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", late)
    assert list(Mailbox(tmp_path).take()) == []


class Messages(RuleBasedStateMachine):
    """What is in the folder of a mailbox is taken once and whole, in any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.mailbox = Mailbox(self.folder)
        self.waiting: dict[str, bytes] = {}
        self.others: set[str] = set()

    keys = st.integers(0, 4).map("{}.json".format)

    @rule(key=keys, content=st.binary(max_size=8))
    def post(self, key: str, content: bytes) -> None:
        write_atomic(self.folder / f"request-{key}", content)
        self.waiting[key] = content

    @rule(key=keys)
    def die_while_posting(self, key: str) -> None:
        (self.folder / f".request-{key}.17").write_bytes(b"{")

    @rule(key=keys)
    def withdraw(self, key: str) -> None:
        (self.folder / f"request-{key}").unlink(missing_ok=True)
        self.waiting.pop(key, None)

    @rule(name=st.sampled_from(["driver.json", "ended.json", "reports"]))
    def write_another_file(self, name: str) -> None:
        (self.folder / name).touch()
        self.others.add(name)

    @rule()
    def make_a_folder_with_the_name_of_a_request(self) -> None:
        (self.folder / "request-.json").mkdir(exist_ok=True)

    @rule()
    def take_and_answer(self) -> None:
        request = next(self.mailbox.take(), None)
        if request is None:
            assert not self.waiting
            return
        assert request.content == self.waiting.pop(request.key)
        self.mailbox.answer(request, b"done")
        assert (self.folder / f"answer-{request.key}").read_bytes() == b"done"

    @rule()
    def start_another_run(self) -> None:
        shutil.rmtree(self.folder / "request-.json", ignore_errors=True)
        self.mailbox.open()
        self.waiting.clear()
        assert set(messages(self.folder)) == self.others

    @invariant()
    def other_files_stay(self) -> None:
        assert self.others <= set(messages(self.folder))

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestMessages = Messages.TestCase
TestMessages.settings = settings(max_examples=60, deadline=None)


def test_a_missing_run_folder_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    require_folder(tmp_path)
    with pytest.raises(UsageError, match="none: no such folder; RUN is a run folder, as in runs/NAME"):
        require_folder(tmp_path / "none")


def test_an_operation_in_a_child_fails_as_it_would_here(tmp_path: Path) -> None:
    run_in_child((tmp_path / "file").touch, WAIT_S)
    assert messages(tmp_path) == ["file"]
    with pytest.raises(OSError, match="No space left on device") as caught:
        run_in_child(lambda: full_disk(), WAIT_S)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError) as caught:
        run_in_child(lambda: 1 // 0, WAIT_S)
    assert caught.value.errno == errno.EIO
    with pytest.raises(TimeoutError):
        run_in_child(lambda: given_up(), WAIT_S)


def test_an_operation_that_hangs_is_left_at_its_bound(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = set(psutil.Process().children())
    with pytest.raises(TimeoutError):
        run_in_child((tmp_path / "pipe").read_bytes, 0.3)
    assert len(set(psutil.Process().children()) - before) == 1
    (tmp_path / "pipe").write_bytes(b"")
    wait_for_children_but(before)


def test_a_request_that_is_written_too_late_is_not_posted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung disk that answers again, without a disk: the child writes after the command has given up."""
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: (time.sleep(1.0), write(path, data))[1])
    before = set(psutil.Process().children())
    with pytest.raises(TimeoutError):
        Mailbox(tmp_path).ask(b"", WAIT_S, 0.2)
    wait_for_children_but(before)
    assert messages(tmp_path) == []


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount file systems")
def test_a_disk_that_hangs_does_not_block_the_command_and_takes_no_request_afterwards(tmp_path: Path) -> None:
    with own_disk(tmp_path / "disk", 32) as disk:
        mailbox = Mailbox(disk / "box")
        mailbox.open()
        before = set(psutil.Process().children())
        with frozen(disk), pytest.raises(TimeoutError):
            mailbox.ask(b"", WAIT_S, 0.5)
        wait_for_children_but(before)
        assert messages(disk / "box") == []


def given_up() -> None:
    raise TimeoutError


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for_children_but(others: set[psutil.Process]) -> None:
    """Wait until all other children have ended and left no zombie."""
    wait_for(lambda: set(psutil.Process().children()) <= others)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

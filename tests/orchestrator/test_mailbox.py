"""Requests and answers as files: each is seen once and whole, and nobody waits longer than asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.mailbox import LONGEST, Mailbox, Request


@pytest.fixture
def box(tmp_path: Path) -> Mailbox:
    """A mailbox that a run has opened."""
    made = Mailbox(tmp_path / "control")
    made.open()
    return made


@contextmanager
def serving(box: Mailbox, reply: Callable[[Request], bytes]) -> Iterator[list[bytes | None]]:
    """A run that answers, in a thread; yields what it was asked."""
    stop, asked = threading.Event(), list[bytes | None]()

    def serve() -> None:
        while not stop.wait(0.002):
            for request in box.take():
                asked.append(request.content)
                box.answer(request, reply(request))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        stop.set()
        thread.join()


def names(box: Mailbox) -> list[str]:
    """Files that are left in the folder, temporary ones included."""
    return [path.name for path in box.folder.iterdir()]


def test_a_request_is_answered_and_leaves_no_file(box: Mailbox) -> None:
    with serving(box, lambda request: (request.content or b"").upper()) as asked:
        assert box.ask("scale", 5.0) == b"SCALE"
        assert box.ask(b"", 5.0) == b""
    assert (asked, names(box)) == ([b"scale", b""], [])


def test_the_folder_is_private_and_what_an_earlier_run_left_is_deleted(box: Mailbox) -> None:
    assert box.folder.stat().st_mode & 0o777 == 0o700
    for name in ("request-1.json", "answer-1.json", "run.json"):
        (box.folder / name).write_text("{}")
    box.open()
    assert names(box) == ["run.json"]


def test_a_request_that_is_not_answered_is_withdrawn(box: Mailbox) -> None:
    began = time.monotonic()
    assert box.ask("anyone?", 0.3) is None
    assert time.monotonic() - began < 5.0
    assert names(box) == []


def test_a_run_that_ends_while_it_is_asked_fails_the_request(box: Mailbox) -> None:
    gone = threading.Timer(0.2, shutil.rmtree, [box.folder])
    gone.start()
    with pytest.raises(FileNotFoundError):
        box.ask("anyone?", 30.0)
    gone.join()
    with pytest.raises(FileNotFoundError):
        box.ask("anyone?", 30.0)


def test_a_request_that_cannot_be_written_is_not_waited_for(box: Mailbox) -> None:
    began = time.monotonic()
    assert box.ask("anyone?", 30.0, change=lambda write: False) is None
    assert time.monotonic() - began < 5.0


def test_an_unfinished_request_is_not_taken_and_a_long_one_is_cut(box: Mailbox) -> None:
    (box.folder / ".request-1.json.17").write_text('{"changes"')
    (box.folder / "request-2.json").write_bytes(b"x" * 10 * LONGEST)
    (box.folder / "request-3.json").symlink_to("nowhere")
    long, unreadable = box.take()
    assert (long.key, long.too_long, len(long.content or b"")) == ("2.json", True, LONGEST + 1)
    assert (unreadable.content, unreadable.too_long) == (None, False)
    assert names(box) == [".request-1.json.17"]


def test_processes_that_ask_at_once_get_their_own_answers(box: Mailbox) -> None:
    code = (
        "import sys; from pathlib import Path; from troupe.orchestrator.mailbox import Mailbox;"
        "box, who = Mailbox(Path(sys.argv[1])), sys.argv[2];"
        "print(all(box.ask(f'{who} {n}', 60.0) == f'{who} {n}'.encode() for n in range(5)))"
    )
    with serving(box, lambda request: request.content or b"") as asked:
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(box.folder), who], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            for who in "abc"
        ]
        assert [client.communicate(timeout=60)[0].strip() for client in clients] == ["True"] * 3
    assert sorted(asked, key=str) == sorted((f"{who} {n}".encode() for who in "abc" for n in range(5)), key=str)
    assert names(box) == []

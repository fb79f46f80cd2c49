"""Files that may hold a secret are readable by their owner only, whatever the umask and whatever was there before."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.live.control import FOLDER, ControlServer
from troupe.orchestrator.live.lock import LOCK_FILE, locked
from troupe.orchestrator.live.mailbox import Mailbox, PostedRequest
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.agents.judges.cache import AnswerCache
from troupe.workers.contract.atomic_file import PRIVATE, replacing, write_atomic


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Nothing of this process is private by itself."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def test_a_private_file_replaces_what_was_there(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "spec.yaml", tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    path.symlink_to(elsewhere)
    write_atomic(path, "mine é", PRIVATE)
    assert (path.read_text(encoding="utf-8"), mode(path), path.is_symlink()) == ("mine é", "0o600", False)
    assert elsewhere.read_text() == "theirs"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "spec.yaml"]


def test_a_private_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_atomic(tmp_path / "folder", "text", PRIVATE)
    with pytest.raises(OSError):
        write_atomic(tmp_path / "none" / "file", "text", PRIVATE)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_the_files_of_a_run_are_private(tmp_path: Path) -> None:
    spec = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml")
    (tmp_path / "spec.yaml").touch(mode=0o644)
    spec.write(tmp_path / "spec.yaml")
    with locked(tmp_path):
        assert (mode(tmp_path / LOCK_FILE), mode(tmp_path / "spec.yaml")) == ("0o600", "0o600")


async def test_the_control_folder_and_its_messages_are_private(tmp_path: Path) -> None:
    scaler: Any = None  # no request arrives
    server = ControlServer(tmp_path, scaler)
    await server.open()
    await asyncio.sleep(0)
    assert mode(tmp_path / FOLDER) == "0o700"
    await server.close()
    mailbox = Mailbox(tmp_path / FOLDER)
    mailbox.open()
    mailbox._post("one.json", b"{}", time.monotonic() + 60)
    mailbox.answer(PostedRequest("other.json", b"{}"), b"{}")
    assert [mode(file) for file in mailbox.folder.iterdir()] == ["0o600", "0o600"]


def test_the_cache_of_a_judge_is_private(tmp_path: Path) -> None:
    cache = AnswerCache(str(tmp_path / "answers"))
    cache.add({"question": "answer"})
    assert {mode(file) for file in tmp_path.iterdir()} == {"0o600"}
    cache.close()


def test_a_token_is_created_for_its_owner_only_and_an_existing_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_nodes._create_token()
    token = tmp_path / ".ray" / "auth_token"
    assert (len(token.read_text()), mode(token)) == (64, "0o600")
    before = token.read_text()
    ray_nodes._create_token()
    assert token.read_text() == before and [path.name for path in token.parent.iterdir()] == ["auth_token"]
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    ray_nodes._create_token()
    (tmp_path / "file").touch()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    ray_nodes._create_token()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ray", "file"]


def test_two_threads_replace_the_same_file(tmp_path: Path) -> None:
    """The one that ends last wins, and neither writes to the other's unfinished file."""
    path = tmp_path / "spec.yaml"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path, PRIVATE) as second:
            second.write_text("second")
        assert (path.read_text(), mode(path)) == ("second", "0o600")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("first", [path])


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """A failed write has no path of its own."""
    path = tmp_path / "spec.yaml"
    with (
        pytest.raises(OSError, match=f"No space left on device: '{path}'"),
        replacing(path),
        Path("/dev/full").open("w") as full,
    ):
        full.write("no space")
    assert list(tmp_path.iterdir()) == []

"""Checkpoints: whole or not there (F8 damage, F9 kills in the middle of a save, F10 disk full)."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import (
    MANIFEST,
    STATE,
    CheckpointError,
    CheckpointStore,
    Refused,
    export_model,
    take_up,
    verify,
)
from orchestrator.errors import TroupeError
from orchestrator.handles import Gang
from tests.fakes import FakeHandle, FakePolicy

ROOT = Path(__file__).resolve().parent.parent


def save(store: CheckpointStore, step: int, **state: Any) -> None:
    path = store.begin(step)
    (path / "policy").mkdir()
    for rank in range(2):
        (path / "policy" / f"rank{rank}.safetensors").write_bytes(bytes([step % 256, rank]) * 500)
    store.commit(path, {"step": step, **state})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints", keep=3)
    made.prepare()
    return made


def names(store: CheckpointStore) -> list[str]:
    return sorted(entry.name for entry in store.directory.iterdir())


def test_what_was_saved_comes_back(store: CheckpointStore) -> None:
    assert store.latest() is None
    save(store, 10, ledger={"trained": [1, 2]}, name="é\ud800")
    found = store.latest()
    assert found is not None
    assert (found.step, found.path.name) == (10, "step-000010")
    assert found.state == {"step": 10, "ledger": {"trained": [1, 2]}, "name": "é\ud800"}
    assert (found.path / "policy" / "rank1.safetensors").read_bytes() == bytes([10, 1]) * 500
    manifest = json.loads((found.path / MANIFEST).read_text())
    assert set(manifest["files"]) == {STATE, "policy/rank0.safetensors", "policy/rank1.safetensors"}


def test_a_role_with_another_number_of_workers_is_told_of(store: CheckpointStore) -> None:
    save(store, 10)
    found = store.latest()
    assert found is not None
    (found.path / "critic").mkdir()
    (found.path / "critic" / "rank0").touch()

    def gang(role: str, ranks: int) -> Gang:
        return Gang(role, [FakeHandle(f"{role}-{rank}", FakePolicy(rank)) for rank in range(ranks)], 256)

    async def told(workers: int) -> list[str]:
        return await take_up(found, [gang("policy", workers), gang("critic", 1)], 5.0)

    assert asyncio.run(told(2)) == []
    assert asyncio.run(told(3)) == ["policy: 2 worker(s) in the checkpoint, 3 now: states are laid out anew"]


def test_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 10, 100, 1_000_000):
        save(store, step)
    assert store.steps() == [10, 100, 1_000_000]
    assert names(store) == ["step-000010", "step-000100", "step-1000000"]


def test_a_save_is_invisible_until_it_is_committed(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.begin(2)
    (path / "half").write_bytes(b"x")
    found = store.latest()
    assert found is not None and found.step == 1
    assert store.steps() == [1]


def test_the_same_step_can_be_saved_again(store: CheckpointStore) -> None:
    save(store, 1, turn=1)
    save(store, 1, turn=2)
    found = store.latest()
    assert found is not None and found.state["turn"] == 2
    assert names(store) == ["step-000001"]


def test_a_damaged_later_checkpoint_does_not_push_out_good_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 20)
    (tmp_path / "step-000020" / STATE).write_text("")
    assert store.latest() is None
    save(store, 15)
    found = store.latest()
    assert found is not None and found.step == 15


def test_state_must_be_json(store: CheckpointStore) -> None:
    for state in ({"x": float("nan")}, {"x": {1}}):
        with pytest.raises((ValueError, TypeError)):
            store.commit(store.begin(1), state)
    with pytest.raises(ValueError, match="was not made by begin"):
        store.commit(store.directory / "elsewhere", {})
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore("x", keep=0)
    assert store.latest() is None


# F8: damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


SHARD = "policy/rank1.safetensors"
DAMAGE = {"truncated": truncate, "flipped": flip, "missing": Path.unlink, "empty": empty, "grown": grow, "a link": link}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("file", [SHARD, STATE, MANIFEST])
def test_damage_is_refused_by_name_and_the_previous_one_used(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None]
) -> None:
    save(store, 1)
    save(store, 2)
    damage(store.directory / "step-000002" / file)
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None and found.step == 1
    [record] = caplog.records
    assert "step-000002 is refused" in record.getMessage()
    if file != MANIFEST:
        assert Path(file).name in record.getMessage() or "elsewhere" in record.getMessage()


def test_an_unlisted_file_and_a_renamed_folder_are_refused(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.directory / "step-000001"
    (path / "policy" / "extra.pt").write_bytes(b"not ours")
    with pytest.raises(Refused, match=r"policy/extra\.pt is not in manifest\.json"):
        verify(path)
    (path / "policy" / "extra.pt").unlink()
    verify(path)
    with pytest.raises(Refused, match="is of step 1"):
        verify(path.rename(store.directory / "step-000007"))


def test_an_empty_folder_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    (store.directory / "step-000002").mkdir()
    found = store.latest()
    assert found is not None and found.step == 1


# F9: kills

SAVER = """
import sys, os
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from orchestrator.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
store.prepare()
found = store.latest()
step = found.step if found else 0
print("ready", flush=True)
while True:
    # Every other save replaces the checkpoint of the step before.
    for turn in (0, 1):
        step += turn == 0
        path = store.begin(step)
        for rank in range(3):
            (path / f"rank{rank}").write_bytes(bytes([step % 256]) * 200_000)
        store.commit(path, {"step": step})
        print(step, flush=True)
"""


def test_a_kill_at_any_moment_of_a_save_leaves_the_newest_checkpoint_valid(tmp_path: Path) -> None:
    draw = random.Random(7)
    committed = 0
    for _ in range(12):
        command = [sys.executable, "-c", SAVER, str(tmp_path), str(ROOT)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.0, 0.1))
            saver.send_signal(signal.SIGKILL)
            rest = saver.stdout.read().splitlines()
        committed = max([committed, *map(int, rest)])
        store = CheckpointStore(tmp_path, keep=2)
        store.prepare()
        found = store.latest()
        if committed:
            assert found is not None and found.step >= committed
        if found is not None:
            committed = found.step
            assert found.state == {"step": found.step}
            for rank in range(3):
                assert (found.path / f"rank{rank}").read_bytes() == bytes([found.step % 256]) * 200_000
        assert all(name.startswith("step-") for name in names(store))
    assert committed > 0


def test_prepare_removes_leftovers_and_puts_back_what_was_being_replaced(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    (store.begin(3) / "half").write_bytes(b"x")
    (store.directory / "step-000002").rename(store.directory / ".replaced-step-000002")
    (store.directory / ".removed-step-000000").mkdir()
    (store.directory / "notes.txt").write_text("the user's own")
    store.prepare()
    assert names(store) == ["notes.txt", "step-000001", "step-000002"]
    found = store.latest()
    assert found is not None and found.step == 2
    (store.directory / ".replaced-step-000002").mkdir()
    store.prepare()
    assert names(store) == ["notes.txt", "step-000001", "step-000002"]


# F10: disk full

LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from orchestrator.checkpoint import CheckpointError, CheckpointStore
store = CheckpointStore(sys.argv[1], keep=1)
path = store.begin(2)
(path / "rank0").write_bytes(b"x")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.commit(path, {"filler": "x" * 100_000})
except CheckpointError as error:
    print(error.filename)
    print(error)
"""


def test_a_write_that_fails_names_the_path_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    filename, message = done.stdout.splitlines()
    assert filename == str(tmp_path / ".saving-step-000002" / STATE)
    assert filename in message and "too large" in message
    assert names(store) == ["step-000001"]
    found = store.latest()
    assert found is not None and found.step == 1


def test_no_space_left_is_a_checkpoint_error(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.begin(2)
    (path / STATE).symlink_to("/dev/full")
    with pytest.raises(CheckpointError) as caught:
        store.commit(path, {"filler": "x"})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path / STATE)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, TroupeError)
    assert names(store) == ["step-000001"]


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", keep=1)
    for attempt in (store.prepare, lambda: store.begin(1)):
        with pytest.raises(CheckpointError, match="checkpoints"):
            attempt()


def test_a_link_among_the_files_is_refused_at_commit(store: CheckpointStore) -> None:
    path = store.begin(1)
    (path / "weights").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="weights is not a plain file"):
        store.commit(path, {})
    assert names(store) == []


# Export


def save_with_model(store: CheckpointStore, step: int) -> None:
    path = store.begin(step)
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(f'{{"step": {step}}}')
    store.commit(path, {})


def test_export_copies_the_model_of_the_asked_or_newest_step(store: CheckpointStore, tmp_path: Path) -> None:
    save_with_model(store, 1)
    save_with_model(store, 2)
    newest = export_model(store.directory, tmp_path / "newest")
    assert (newest / "config.json").read_text() == '{"step": 2}'
    first = export_model(store.directory, tmp_path / "first", step=1)
    assert (first / "config.json").read_text() == '{"step": 1}'
    with pytest.raises(CheckpointError, match="exists"):
        export_model(store.directory, tmp_path / "first")


def test_export_refuses_what_it_cannot_trust_or_find(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        export_model(store.directory, tmp_path / "x")
    save(store, 1)
    with pytest.raises(CheckpointError, match="holds no model"):
        export_model(store.directory, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        export_model(store.directory, tmp_path / "x", step=9)
    save_with_model(store, 2)
    flip(store.directory / "step-000002" / "model" / "config.json")
    with pytest.raises(CheckpointError, match=r"model/config\.json is not what was written"):
        export_model(store.directory, tmp_path / "x", step=2)
    assert not (tmp_path / "x").exists()

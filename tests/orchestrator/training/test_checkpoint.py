"""Checkpoints are whole or absent: damaged files, kills during a save, a full disk, and export."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeCritic, FakePolicy, critic_group, policy_group
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.training.checkpoint import (
    MANIFEST,
    STATE,
    CheckpointError,
    CheckpointStore,
    InvalidCheckpoint,
    load_checkpoint,
    verify,
)
from troupe.orchestrator.training.export import exported_model, write_model

ROOT = Path(__file__).resolve().parents[3]


def save(store: CheckpointStore, step: int, **state: Any) -> None:
    path = store.begin(step)
    (path / "policy").mkdir()
    for rank in range(2):
        (path / "policy" / f"rank{rank}.safetensors").write_bytes(bytes([step % 256, rank]) * 500)
    store.commit(path, {"step": step, **state})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    store.prepare()
    return store


def names(store: CheckpointStore) -> list[str]:
    return sorted(entry.name for entry in store.directory.iterdir())


def test_a_saved_checkpoint_is_loaded_unchanged(store: CheckpointStore) -> None:
    assert store.latest() is None
    save(store, 10, ledger={"trained": [1, 2]}, name="é\ud800")
    found = store.latest()
    assert found is not None
    assert (found.step, found.path.name) == (10, "step-000010")
    assert found.state == {"step": 10, "ledger": {"trained": [1, 2]}, "name": "é\ud800"}
    assert (found.path / "policy" / "rank1.safetensors").read_bytes() == bytes([10, 1]) * 500
    manifest = json.loads((found.path / MANIFEST).read_text())
    assert set(manifest["files"]) == {STATE, "policy/rank0.safetensors", "policy/rank1.safetensors"}


def test_every_byte_is_on_disk_before_a_checkpoint_has_its_name(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, the folders that list them, the rename, and then the folder in which the name is."""
    done: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        assert {source, *source.rglob("*")} == set(done)
        done[:] = [target]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save(store, 10)
    assert done == [store.directory / "step-000010", store.directory]


def test_another_number_of_workers_is_reported(store: CheckpointStore) -> None:
    save(store, 10)
    found = store.latest()
    assert found is not None
    (found.path / "critic").mkdir()
    (found.path / "critic" / "rank0").touch()

    async def load_with(workers: int) -> list[str]:
        policy = policy_group(*(FakePolicy(rank) for rank in range(workers)))
        return await load_checkpoint(found, [policy, critic_group(FakeCritic())], 5.0)

    assert asyncio.run(load_with(2)) == []
    assert asyncio.run(load_with(3)) == ["policy: 2 worker(s) in the checkpoint, 3 now: optimizer states are resharded"]


def test_the_newest_checkpoints_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 10, 100, 1_000_000):
        save(store, step)
    assert store.steps() == [10, 100, 1_000_000]
    assert names(store) == ["step-000010", "step-000100", "step-1000000"]
    save(store, 11)  # of a run that resumed from step 10: later ones stay, and do not count
    assert store.steps() == [10, 11, 100, 1_000_000]


def test_a_protected_checkpoint_is_kept_beside_the_newest(store: CheckpointStore) -> None:
    store.protected = frozenset({2})
    store.use(1)
    for step in range(1, 7):
        save(store, step)
    assert store.steps() == [1, 2, 4, 5, 6]


def test_a_checkpoint_is_there_until_the_one_that_replaces_it_is(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 10)
    replace, moved = os.replace, list[tuple[str, str]]()

    def renamed(source: Path, target: Path) -> None:
        moved.append((source.name, target.name))
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    save(store, 10)
    final, replaced = "step-000010", ".replaced-step-000010"
    assert moved == [(final, replaced), (".saving-step-000010", final)] and names(store) == [final]


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


def test_a_damaged_later_checkpoint_does_not_displace_valid_ones(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="was not created by begin"):
        store.commit(store.directory / "elsewhere", {})
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore("x", keep=0)
    assert store.latest() is None


# Damaged files


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
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None]
) -> None:
    save(store, 1)
    save(store, 2)
    damage(store.directory / "step-000002" / file)
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None and found.step == 1
    [record] = caplog.records
    assert "step-000002: " in record.getMessage()
    if file != MANIFEST:
        assert Path(file).name in record.getMessage() or "elsewhere" in record.getMessage()


def test_an_unlisted_file_and_a_renamed_folder_are_refused(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.directory / "step-000001"
    (path / "policy" / "extra.pt").write_bytes(b"not ours")
    with pytest.raises(InvalidCheckpoint, match=r"policy/extra\.pt is not listed in manifest\.json"):
        verify(path)
    (path / "policy" / "extra.pt").unlink()
    verify(path)
    with pytest.raises(InvalidCheckpoint, match="belongs to step 1"):
        verify(path.rename(store.directory / "step-000007"))


def test_an_empty_folder_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    (store.directory / "step-000002").mkdir()
    found = store.latest()
    assert found is not None and found.step == 1


# Kills during a save

SAVER = """
import sys, os
sys.path.insert(0, sys.argv[2])
from troupe.orchestrator.training.checkpoint import CheckpointStore
for _ in sys.stdin:  # a fork for every line, so that the imports are made once
    if (pid := os.fork()) == 0:
        break
    os.waitpid(pid, 0)
    os.write(1, b"killed\\n")
else:
    sys.exit()
store = CheckpointStore(sys.argv[1], keep=2)
store.prepare()
found = store.latest()
step = found.step if found else 0
os.write(1, b"%d\\n" % os.getpid())
while True:
    # Every other save replaces the checkpoint of the step before.
    for turn in (0, 1):
        step += turn == 0
        path = store.begin(step)
        for rank in range(3):
            (path / f"rank{rank}").write_bytes(bytes([step % 256]) * 200_000)
        store.commit(path, {"step": step})
        os.write(1, b"%d\\n" % step)  # at once: a print may write the number and the end of its line apart
"""


def test_a_kill_at_any_moment_of_a_save_leaves_the_newest_checkpoint_valid(tmp_path: Path) -> None:
    draw = random.Random(7)
    command = [sys.executable, "-c", SAVER, str(tmp_path), str(ROOT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as saver:
        assert saver.stdin is not None and saver.stdout is not None
        committed = 0
        for number in range(24):
            saver.stdin.write("\n")
            process = int(saver.stdout.readline())
            if number and not committed:  # on a slow machine the first kill may come before the first commit
                committed = int(saver.stdout.readline())
            time.sleep(draw.uniform(0.0, 0.1))
            os.kill(process, signal.SIGKILL)
            committed = max([committed, *map(int, iter(saver.stdout.readline, "killed\n"))])
            committed = valid_after_a_kill(CheckpointStore(tmp_path, keep=2), committed)
        saver.stdin.close()
    assert committed > 0


def valid_after_a_kill(store: CheckpointStore, committed: int) -> int:
    """Check that the newest checkpoint is whole, and none older than the last one committed; returns its step."""
    store.prepare()
    found = store.latest()
    assert found is not None or not committed
    if found is not None:
        assert found.step >= committed and found.state == {"step": found.step}
        for rank in range(3):
            assert (found.path / f"rank{rank}").read_bytes() == bytes([found.step % 256]) * 200_000
    assert all(name.startswith("step-") for name in names(store))
    return found.step if found else 0


def test_prepare_removes_partial_saves_and_restores_a_checkpoint_being_replaced(store: CheckpointStore) -> None:
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


# Full disk

LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from troupe.orchestrator.training.checkpoint import CheckpointError, CheckpointStore
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


def test_a_failed_write_names_the_path_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
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


def test_a_full_disk_is_a_checkpoint_error(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.begin(2)
    (path / STATE).symlink_to("/dev/full")
    with pytest.raises(CheckpointError) as caught:
        store.commit(path, {"filler": "x"})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path / STATE)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, TroupeError)
    assert names(store) == ["step-000001"]


def test_a_folder_that_cannot_be_created_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", keep=1)
    for attempt in (store.prepare, lambda: store.begin(1)):
        with pytest.raises(CheckpointError, match="checkpoints"):
            attempt()


def test_a_link_among_the_files_is_refused_at_commit(store: CheckpointStore) -> None:
    path = store.begin(1)
    (path / "weights").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="weights is not a regular file"):
        store.commit(path, {})
    assert names(store) == []


# Export


def export_model(directory: Path, target: Path, step: int | None = None) -> Path:
    return write_model(exported_model(directory, step), target)


def save_with_model(store: CheckpointStore, step: int) -> None:
    path = store.begin(step)
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(f'{{"step": {step}}}')
    store.commit(path, {})


def test_export_copies_the_model_of_the_given_or_newest_step(store: CheckpointStore, tmp_path: Path) -> None:
    save_with_model(store, 1)
    save_with_model(store, 2)
    newest = export_model(store.directory, tmp_path / "newest")
    assert (newest / "config.json").read_text() == '{"step": 2}'
    first = export_model(store.directory, tmp_path / "first", step=1)
    assert (first / "config.json").read_text() == '{"step": 1}'
    with pytest.raises(CheckpointError, match="exists"):
        export_model(store.directory, tmp_path / "first")


def test_an_exported_model_may_be_read_as_any_new_file(store: CheckpointStore, tmp_path: Path) -> None:
    save_with_model(store, 1)
    (store.directory / "step-000001" / "model" / "config.json").chmod(0o600)  # as safetensors writes weights
    (plain := tmp_path / "plain").touch()
    exported = export_model(store.directory, tmp_path / "exported")
    assert (exported / "config.json").stat().st_mode == plain.stat().st_mode


def test_export_refuses_missing_and_damaged_checkpoints(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        export_model(store.directory, tmp_path / "x")
    save(store, 1)
    with pytest.raises(CheckpointError, match="has no folder model"):
        export_model(store.directory, tmp_path / "x")
    with pytest.raises(CheckpointError, match="no such checkpoint; steps with one: 1"):
        export_model(store.directory, tmp_path / "x", step=9)
    save_with_model(store, 2)
    flip(store.directory / "step-000002" / "model" / "config.json")
    with pytest.raises(CheckpointError, match=r"model/config\.json has changed"):
        export_model(store.directory, tmp_path / "x", step=2)
    assert not (tmp_path / "x").exists()


def test_the_last_checkpoint_with_a_model_is_kept_until_there_is_a_newer_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.prepare()
    save_with_model(store, 1)
    save_with_model(store, 2)
    for step in (3, 4, 5):
        save(store, step)
    assert store.steps() == [2, 4, 5]
    save_with_model(store, 6)
    assert store.steps() == [5, 6]

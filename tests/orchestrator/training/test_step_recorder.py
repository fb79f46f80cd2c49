"""What a run keeps of its steps, and the replay of it, against fakes."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from tests.fakes import FakePolicy, FakeTable, fakes_of
from tests.orchestrator.test_controller import RolloutRun
from tests.orchestrator.training.test_recovery import RecoveringRun
from troupe.orchestrator.errors import UsageError, WorkerRaised
from troupe.orchestrator.insight.replay import Repeated, Replayer
from troupe.orchestrator.training.checkpoint import CheckpointStore, load_checkpoint
from troupe.orchestrator.training.step_record import STEP, RecordedStep, folder_of, kept_steps, read_step, read_steps
from troupe.orchestrator.training.updates import Updates
from troupe.workers.contract.messages import KEPT_BATCH, KeptFile
from troupe.workers.contract.units import GIB, MIB


class RecordedRun(RolloutRun):
    """A run with a policy of two ranks and a critic that keeps its steps."""

    def __init__(self, out: Path, resume: bool = False, steps: int = 8, nbytes: int = MIB) -> None:
        """`steps`, `nbytes`: Bounds on what is kept."""
        output = {"replay_steps": steps, "replay_gib": nbytes / GIB}
        super().__init__(out, policies=2, resume=resume, schedule={"minibatches": 2}, output=output)
        self.change(roles={"critic": {"warmup_steps": 1}})

    @property
    def root(self) -> Path:
        """Where the steps are kept."""
        return self.out / "replay"


async def repeat(out: Path, updates: Updates, folders: Sequence[RecordedStep], start: int = 0) -> list[Repeated]:
    """Repeat kept steps on trainers, from the initial model or from the checkpoint of a step."""
    if start:
        found = CheckpointStore(out / "checkpoints", 1).latest(before=start + 1)
        assert found is not None and found.step == start
        await load_checkpoint(found, updates.trainers, 1.0)

    def put(table: pa.Table) -> FakeTable:
        return FakeTable("train", tuple(table.column("uids").to_pylist()))

    replayer = Replayer(updates, put, 1.0)
    return [await replayer.repeat(folder) for folder in folders]


def replayed(out: Path, steps: Sequence[int], start: int = 0) -> list[Repeated]:
    """Repeat steps on new trainers."""

    async def run() -> list[Repeated]:
        updates = RecordedRun(out / "elsewhere").build().components.updates
        return await repeat(out, updates, read_steps(out / "replay", steps), start)

    return asyncio.run(run())


def test_every_step_is_repeated_with_equal_weights(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.run()
    assert kept_steps(run.root) == [1, 2, 3, 4]
    from_start = replayed(tmp_path, [1, 2, 3, 4])
    assert [step.equal for step in from_start] == [True] * 4
    assert [step.equal for step in replayed(tmp_path, [3, 4], start=2)] == [True, True]
    assert all(set(step.recorded) == {"policy", "critic"} for step in from_start)
    assert from_start[0].line().startswith("step 1: equal (policy ")


def test_a_replay_from_the_wrong_weights_is_not_equal_and_says_so(tmp_path: Path) -> None:
    RecordedRun(tmp_path).run()
    (step,) = replayed(tmp_path, [4], start=2)
    assert not step.equal
    assert "step 4: NOT EQUAL (policy" in step.line() and " in the run, " in step.line()


def test_a_step_keeps_what_its_updates_need(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.texts = (7, 3, 9, 4)
    run.run()
    steps = [read_step(run.root, number).kept for number in (1, 2, 3, 4)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for before, after in pairwise(steps):
        assert after.before == before.after != after.after
    first = steps[0]
    assert len(first.rows) == 20 and first.rows[0].tokens == 15
    assert len(first.text_rows) == 6 and first.text_tokens == (7, 3, 9, 4)
    assert [set(metrics) >= {"critic/loss"} for metrics in first.updates] == [True, True]
    assert any(line.startswith("torch ") for line in first.software)


def test_the_oldest_steps_make_room_for_new_ones(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "few", steps=2)
    run.run()
    assert kept_steps(run.root) == [3, 4]
    one = sum(file.stat().st_size for file in folder_of(run.root, 4).iterdir())
    small = RecordedRun(tmp_path / "small", nbytes=int(2.5 * one))
    small.run()
    assert kept_steps(small.root) == [3, 4]


def test_a_step_larger_than_the_bound_ends_the_keeping_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second run resumes with a smaller bound than the first one had."""
    first = RecordedRun(tmp_path)
    first.run_until(2)
    one = sum(file.stat().st_size for file in folder_of(first.root, 2).iterdir())
    second = RecordedRun(tmp_path, resume=True, nbytes=one // 2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "troupe.orchestrator.training.step_recorder"):
        assert second.run().steps_done == 4
    assert sorted(path.name for path in second.root.iterdir()) == ["step-000001", "step-000002"], "they stay"
    assert sum(worker.calls.count("keep_batch") for worker in fakes_of(second.policy)) == 1, "step 4 is not written"
    (warning,) = caplog.records
    assert "step 3 alone has" in warning.getMessage() and "more than output.replay_gib (" in warning.getMessage()


def test_a_resumed_run_replaces_what_was_kept_after_its_checkpoint(tmp_path: Path) -> None:
    first = RecordedRun(tmp_path)
    first.run_until(2)
    stale = folder_of(first.root, 3)
    shutil.copytree(folder_of(first.root, 2), stale)
    (first.root / ".unfinished-000009").mkdir()
    second = RecordedRun(tmp_path, resume=True)
    second.run()
    assert sorted(path.name for path in second.root.iterdir()) == [f"step-00000{step}" for step in (1, 2, 3, 4)]
    assert [step.equal for step in replayed(tmp_path, [1, 2])] == [True] * 2
    assert [step.equal for step in replayed(tmp_path, [3, 4])] == [True] * 2  # these fakes resume with nothing learned


def test_a_restarted_trainer_has_the_digest_of_a_run_without_a_loss(tmp_path: Path) -> None:
    whole = RecoveringRun(tmp_path / "whole")
    whole.change(output={"replay_steps": 8})
    whole.run()
    for number, method in enumerate(("update", "digest", "keep_batch")):
        run = RecoveringRun(tmp_path / method, ("policy-0", method, 3), ("critic-0", "digest", 2 + number))
        run.change(output={"replay_steps": 8})
        run.run()
        for step in (1, 2, 3, 4):
            ours, theirs = (read_step(out / "replay", step).kept for out in (run.out, whole.out))
            assert (ours.before, ours.after) == (theirs.before, theirs.after), (method, step)


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RecordedRun(tmp_path)
    full = {1, 2}

    class FullDisk(FakePolicy):
        """A policy whose disk is full in the first steps."""

        async def keep_batch(
            self, folder: str, batch: FakeTable, texts: FakeTable | None = None, rows: Sequence[int] = ()
        ) -> dict[str, KeptFile]:
            if int(folder[-6:]) in full:
                raise WorkerRaised("policy-0", "keep_batch", "[Errno 28] No space left on device")
            return await super().keep_batch(folder, batch, texts, rows)

    run.policies = [FullDisk(0), FullDisk(1)]
    with caplog.at_level(logging.WARNING, "troupe.orchestrator.training.step_recorder"):
        assert run.run().steps_done == 4
    assert kept_steps(run.root) == [3, 4]
    assert [path.name for path in run.root.iterdir() if path.name.startswith(".")] == []
    (warning,) = caplog.records
    assert (
        f"step 1 is not kept in {run.root} for `troupe replay`: policy-0.keep_batch: [Errno 28]" in warning.getMessage()
    )
    assert read_step(run.root, 3).kept.before, "the digest was taken although the tables were not written"


def test_a_folder_that_cannot_be_created_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "replay").write_text("a file")
    assert RecordedRun(tmp_path).run().steps_done == 4


def test_a_damaged_table_is_refused_by_its_digest(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.run()
    path = folder_of(run.root, 2) / KEPT_BATCH
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"step-000002/batch.arrow has changed: it has digest \w+ and \d+ bytes; the"):
        replayed(tmp_path, [1, 2])
    path.unlink()
    with pytest.raises(UsageError, match=r"step-000002/batch.arrow is missing: replay another step"):
        replayed(tmp_path, [1, 2])


def test_a_step_that_cannot_be_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    words = r"step 1 is not kept in .*the run has kept no step \(output.replay_steps, output.replay_gib\)"
    with pytest.raises(UsageError, match=words):
        read_step(run.root, 1)
    run.run()
    with pytest.raises(UsageError, match=r"step 9 is not kept in .*; kept are 4 steps, 1 to 4"):
        read_step(run.root, 9)
    file = folder_of(run.root, 1) / STEP
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"format": 2}))
    with pytest.raises(UsageError, match=r"step.json cannot be read: format"):
        read_step(run.root, 1)
    file.write_text(file.read_text()[:50])
    with pytest.raises(UsageError, match=r"step.json cannot be read: "):
        read_step(run.root, 1)


def test_a_run_that_keeps_nothing_asks_the_trainers_nothing(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path)
    run.run()
    calls = {call for worker in fakes_of(run.policy) for call in worker.calls}
    assert calls and not calls & {"digest", "keep_batch"}
    assert not (tmp_path / "replay").exists()

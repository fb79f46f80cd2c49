"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakePolicy, FakeTable, FakeTrainer
from tests.orchestrator.test_best_checkpoint import run_of as evaluated
from tests.orchestrator.test_controller import RolloutRun
from tests.orchestrator.training.test_offline_source import OfflineRun
from tests.orchestrator.training.test_recovery import RecoveringRun
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.roles import JudgeRole
from troupe.orchestrator.training.checkpoint import CheckpointStore, verify
from troupe.orchestrator.training.parts import UpdatedStep
from troupe.orchestrator.training.saves import RunSaves
from troupe.workers.contract.messages import RankPlan, SaveStatus, UpdateMetrics

EACH = {"every_steps": 1, "async_save": True}


def run_of(out: Path, *, write_s: float = 0.0, resume: bool = False, **sections: Mapping[str, Any]) -> RolloutRun:
    run = RolloutRun(out, 1, resume, **({"checkpoint": EACH} | sections))
    for policy in run.policies:
        policy.write_s = write_s
    return run


def tree(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


def events(out: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (out / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "checkpoint"]


def steps(out: Path) -> list[int]:
    return CheckpointStore(out / "checkpoints", 2).steps()


@pytest.mark.parametrize("write_s", [0.0, 0.05])
def test_the_checkpoints_are_those_of_a_run_that_waits(tmp_path: Path, write_s: float) -> None:
    """All but the last one are written while later steps train."""
    fields, strict = {"every_steps": 1, "samples_mib": 0}, {"max_staleness": 0}
    waits = RolloutRun(tmp_path / "waits", checkpoint=fields, schedule=strict)
    waits.run()
    run = run_of(tmp_path / "run", write_s=write_s, checkpoint={**fields, "async_save": True}, schedule=strict)
    run.run()
    assert steps(waits.out) == steps(run.out) == [3, 4]
    for step in (3, 4):
        one, other = (run.out / "checkpoints" / f"step-{step:06d}" for run in (waits, run))
        assert tree(one) == tree(other)
    assert [Path(event["path"]).name for event in events(run.out)] == [f"step-{step:06d}" for step in (1, 2, 3, 4)]


def test_the_next_opponent_is_written_before_its_games_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after, written = RunSaves.after_update, dict[int, list[int]]()

    async def watched(saves: RunSaves, step: UpdatedStep) -> None:
        await after(saves, step)
        written[step.number] = steps(run.out)

    monkeypatch.setattr(RunSaves, "after_update", watched)
    run = run_of(tmp_path, write_s=0.3, checkpoint={**EACH, "every_steps": 2}, schedule={"steps": 3})
    judge = JudgeRole.model_validate({"model": {"path": "m"}, "max_model_len": 64, "renew_every": 2})
    roles = run.spec.roles.model_copy(update={"judge": judge})
    run.spec = run.spec.model_copy(update={"roles": roles})
    run.run()
    assert written == {1: [], 2: [], 3: [2]}


def test_offline_training_saves_beside_its_steps_too(tmp_path: Path) -> None:
    runs = {name: OfflineRun(tmp_path / name, ranks=2) for name in ("waits", "beside")}
    for name, run in runs.items():
        run.change(checkpoint={"every_steps": 1, "async_save": name == "beside"})
        for trainer in run.trainers:
            trainer.write_s = 0.01
        run.run()
    assert steps(tmp_path / "waits") == steps(tmp_path / "beside") != []
    for step in steps(tmp_path / "waits"):
        one, other = (tmp_path / name / "checkpoints" / f"step-{step:06d}" for name in runs)
        assert tree(one) == tree(other)


def test_a_best_checkpoint_that_turns_out_not_to_be_written_is_none(tmp_path: Path) -> None:
    """That of step 2, the best one so far, fails beside step 3; then that of step 1 is the best one again."""
    fields = {"async_save": True, "every_steps": 0}
    run = evaluated(tmp_path, 0.1, 0.3, 0.5, 0.2, 0.4, **fields)
    run.policies = [Failing(2)]
    outcome = run.run()
    assert [one.step for one in outcome.best.steps] == [4] and steps(tmp_path) == [4]
    worse = evaluated(tmp_path / "worse", 0.1, 0.3, 0.5, 0.2, **fields)
    worse.policies = [Failing(2)]
    assert [one.step for one in worse.run().best.steps] == [1]
    assert steps(tmp_path / "worse") == [1, 3]


class Slow(FakePolicy):
    """Counts the updates while a save is being written."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = 0
        self.release = asyncio.Event()

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        self.beside += self.saving is not None and not self.saving[1].done()
        if self.beside == 3:
            self.release.set()
        return await super().update(plan, batch, kl_old_coef, texts)

    async def _write(self, copy: FakeTrainer, folders: Sequence[str]) -> SaveStatus:
        await self.release.wait()
        return await super()._write(copy, folders)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The first save is written once three updates have been made beside it: what it holds is older than they are."""
    run = run_of(tmp_path, checkpoint={"every_steps": 5, "async_save": True}, schedule={"steps": 9})
    slow = Slow()
    run.policies = [slow]
    run.run()
    assert slow.beside >= 3 and steps(tmp_path) == [5, 9]
    saved = json.loads((tmp_path / "checkpoints" / "step-000005" / "policy" / "rank-0").read_text())
    assert saved == slow.learned[:5]
    line = run.lines()[5]
    assert line["seconds/save_copy"] >= 0 and "seconds/save_wait" not in line


class WaitedFor(FakePolicy):
    """Writes a save once somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = asyncio.Event()

    async def _write(self, copy: FakeTrainer, folders: Sequence[str]) -> SaveStatus:
        await self.awaited.wait()
        self.awaited.clear()
        return await super()._write(copy, folders)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, policy, settle = run_of(tmp_path), WaitedFor(), RunSaves.settle
    run.policies = [policy]

    async def settled(saves: RunSaves) -> None:
        if saves._running is not None and not saves._running.done():
            policy.awaited.set()
        await settle(saves)

    monkeypatch.setattr(RunSaves, "settle", settled)
    run.run()
    assert all(event["ok"] for event in events(tmp_path)) and len(events(tmp_path)) == 4
    assert ["seconds/save_wait" in line for line in run.lines()] == [False, False, True, True]


class Failing(FakePolicy):
    """Cannot write the saves of these numbers, or their exports."""

    def __init__(self, *numbers: int, export: bool = False) -> None:
        super().__init__()
        self.numbers = numbers
        self.export_fails = export
        self.begun = 0

    async def _write(self, copy: FakeTrainer, folders: Sequence[str]) -> SaveStatus:
        self.begun += 1
        if self.begun not in self.numbers:
            return await super()._write(copy, folders)
        if not self.export_fails:
            return SaveStatus(True, "OSError: [Errno 28] No space left on device")
        await super()._write(copy, folders)
        return SaveStatus(True, export_failed="ValueError: generation_config.json is invalid")


def test_a_failed_save_is_tolerated_as_one_that_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(tmp_path, failures={"failed_saves": 1})
    run.policies = [Failing(1, 3)]
    assert run.run().steps_done == 4
    assert [event["ok"] for event in events(tmp_path)] == [False, True, False, True]
    assert steps(tmp_path) == [2, 4]
    first, second = [record.getMessage() for record in caplog.records if "checkpoint of step" in record.getMessage()]
    assert first.startswith("checkpoint of step 1 failed: ") and " takes " not in first
    place = re.escape(str(tmp_path / "checkpoints"))
    assert re.search(rf"step 3 failed: .*MiB are free in {place}, and the checkpoint of step 2 takes 1\)", second)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_too_many_failed_saves_end_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, failures={"failed_saves": 1})
    run.policies = [Failing(1, 2, 3, 4)]
    with pytest.raises(TroupeError, match=r"2 checkpoints in a row were not written: .*No space left"):
        run.run()
    assert steps(tmp_path) == []


def test_the_state_is_kept_where_only_the_export_fails(tmp_path: Path) -> None:
    run = run_of(tmp_path, failures={"failed_saves": 9})
    run.policies = [Failing(1, 2, 3, 4, export=True)]
    run.run_until(2)
    found = CheckpointStore(tmp_path / "checkpoints", 2).latest()
    assert found is not None
    assert any("cannot be exported" in event.get("detail", "") for event in events(tmp_path))
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    assert not store.has_model(1) and found.exported  # the last one is saved while nothing trains


def test_a_stop_waits_for_the_save_and_saves_the_last_step(tmp_path: Path) -> None:
    run = run_of(tmp_path, write_s=0.05, checkpoint={"every_steps": 2, "async_save": True}, schedule={"steps": 9})
    outcome = run.run_until(3)
    done = outcome.steps_done
    assert outcome.stopped and done >= 3
    assert steps(tmp_path)[-1] == done and {2, done} <= {*steps(tmp_path), 2}
    resumed = run_of(tmp_path, resume=True, schedule={"steps": 9})
    assert resumed.run().ledger["trained"] == 9 * 20
    assert len(resumed.policies[0].updates) == 9 - done


def test_a_run_that_is_killed_meanwhile_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    """The hidden folder of the save under way is never taken for a checkpoint, whatever is written of it."""

    async def killed() -> None:
        run = run_of(tmp_path, checkpoint={"every_steps": 2, "async_save": True}, schedule={"steps": 9})
        controller = run.build()
        task = asyncio.create_task(controller.run())
        while controller.version < 3:
            await asyncio.sleep(0)
        run.policies[0].write_s = 60.0
        while controller.version < 5:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(killed())
    assert steps(tmp_path) == [2]
    assert [path.name for path in (tmp_path / "checkpoints").glob(".saving-*")] == [".saving-step-000004"]
    resumed = run_of(tmp_path, resume=True, schedule={"steps": 9})
    assert resumed.run().steps_done == 9 and len(resumed.policies[0].updates) == 7
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("method", ["update", "begin_save", "save_status", "publish_weights"])
def test_trainers_that_are_lost_beside_a_save_end_with_the_weights_of_a_run_without_a_loss(
    tmp_path: Path, method: str, number: int, staleness: int
) -> None:
    """A save that is lost with them is repeated after the next step; only whole checkpoints are used."""
    sections: dict[str, Any] = {"schedule": {"max_staleness": staleness}, "checkpoint": EACH}
    whole = RecoveringRun(tmp_path / "whole", schedule=sections["schedule"])
    whole.run()
    run = RecoveringRun(tmp_path / "run", ("policy-0", method, number), **sections)
    for policy in run.policies:
        policy.write_s = 0.002
    outcome = run.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    if not staleness:
        assert run.learned == whole.learned
    assert {len(learned) for learned in run.learned} == {6, 8}
    for step in steps(run.out):
        verify(run.out / "checkpoints" / f"step-{step:06d}")
    assert steps(run.out)[-1] == 4

"""What a checkpoint costs a step: written while training waits, and written from a copy while it goes on.

    python -m benchmarks.save_cost
    python -m benchmarks.save_cost --model .cache/models/tiny-llama --dtype float32 --groups 2

One `PolicyWorker` in this process, without Ray. A turn is a save of its whole state and of the exported model, and an
update: training waits for the save (`checkpoint.async_save: false`), or the update runs while it is written (`true`);
the turn ends when both are done. A third contender has updates alone. All commit as a run does, with hashes and fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.packing import LONGEST, Work, work
from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark, take_turns
from benchmarks.support.policy_worker import add_arguments, policy_worker
from benchmarks.support.processes import Meter
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.plan.worker_memory import WIDTHS, Training, save_copy
from troupe.orchestrator.training.checkpoint import MANIFEST, MODEL, CheckpointStore, verify
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.units import GIB

if TYPE_CHECKING:
    from troupe.workers.policy import PolicyWorker

NONE, WAITS, BESIDE = "no save", "saved while training waits", "saved beside training"
WAIT, SHARE = "training waits, s", "training waits, % of the step"
STEPS = Unit("steps", "step", digits=3)
_POLL_S = 0.02
_LONGEST_S = 600.0


class Saves:
    """The turns of the contenders."""

    def __init__(self, worker: PolicyWorker, work: Work, folder: Path) -> None:
        self._worker = worker
        self._table = work.table
        self._plan = work.plan("packed, prompts shared")
        self._store = CheckpointStore(folder, keep=1)
        self._step = 0
        self.copy = 0
        """Bytes by which the first copy made the process larger."""

    async def turn(self, contender: str) -> Turn:
        """A save, if the contender has one, and an update."""
        self._step += 1
        meter, began = Meter(), time.monotonic()
        saving: asyncio.Task[None] | None = None
        if contender == WAITS:
            await self._save_and_wait()
        elif contender == BESIDE:
            saving = asyncio.create_task(self._finish(self._begin()))
        waited = time.monotonic() - began
        await asyncio.to_thread(self._worker.update, self._plan, self._table)
        updated = time.monotonic() - began
        if saving is not None:
            await saving
        turn = meter.turn(1.0)
        share, left = 100 * waited / turn.wall_s, turn.wall_s - updated
        return replace(turn, figures={WAIT: waited, SHARE: share, "left after the update, s": left})

    def _begin(self) -> Path:
        folder = self._store.begin(self._step)
        self._worker.begin_save(str(folder / "policy"), str(folder / MODEL))
        return folder

    async def _finish(self, folder: Path) -> None:
        async with asyncio.timeout(_LONGEST_S):
            while not (status := self._worker.save_status(str(folder / "policy"))).done:
                await asyncio.sleep(_POLL_S)
        if status.failed or status.export_failed:
            raise NotCorrect(status.failed or status.export_failed)
        await asyncio.to_thread(self._store.commit, folder, {})

    async def _save_and_wait(self) -> None:
        folder = self._store.begin(self._step)
        self._worker.save(str(folder / "policy"))
        self._worker.export(str(folder / MODEL))
        await asyncio.to_thread(self._store.commit, folder, {})

    async def check(self) -> str:
        """Save the same state in both ways. Raises NotCorrect where the files differ."""
        process, listed = psutil.Process(), []
        await asyncio.to_thread(self._worker.update, self._plan, self._table)
        for save in (self._save_and_wait, None):
            self._step += 1
            if save is not None:
                await save()
            else:
                before = process.memory_info().rss
                folder = self._begin()
                self.copy = process.memory_info().rss - before
                await self._finish(folder)
            path = self._store.directory / f"step-{self._step:06d}"
            verify(path)
            listed.append(json.loads((path / MANIFEST).read_bytes())["files"])
        if listed[0] != listed[1]:
            raise NotCorrect("the files of the two ways differ")
        nbytes = sum(file["bytes"] for file in listed[0].values())
        return f"{len(listed[0])} files with {nbytes / GIB:.2f} GiB are the same bytes"


def planned(given: argparse.Namespace) -> int:
    """Bytes of the copy by `troupe plan`."""
    size, trainer = read_size(given.model), TrainerConfig(micro_batch_tokens=given.micro_batch_tokens)
    rank = Training(size, given.dtype, trainer, 1, given.device == "cuda", LONGEST, copies_saves=True)
    return save_copy(size, WIDTHS[rank.dtype], rank, trainer.stage_for(1, given.dtype == "float32"))


async def measure(given: argparse.Namespace) -> Report:
    """Build the worker, check that both ways write the same, alternate them. Raises NotCorrect."""
    worker, folder = policy_worker(given, "save-cost", LONGEST), Path(tempfile.mkdtemp(dir=given.folder))
    saves = Saves(worker, work(given), folder)
    try:
        checks = {"files": await saves.check()}
        checks["copy"] = f"{saves.copy / GIB:.2f} GiB of host memory; {planned(given) / GIB:.2f} by `troupe plan`"
        turns = {name: lambda _, name=name: saves.turn(name) for name in (NONE, WAITS, BESIDE)}
        taken = await take_turns(turns, given.turns)
    finally:
        worker.close()
        shutil.rmtree(folder, ignore_errors=True)
    return Report("save_cost", taken, WAITS, checks, STEPS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("save_cost", __doc__, 5)
    add_arguments(parser, groups=4)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written (default: the system's temporary folder)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)

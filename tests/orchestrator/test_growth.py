"""What the driver keeps does not grow with the steps of a run, nor what its checkpoints hold of them."""

from __future__ import annotations

import asyncio
import gc
import io
import types
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes import FakeTrainer, FaultyEngine, FaultyWorker
from tests.orchestrator.test_best_checkpoint import DATA, Values
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.telemetry import run_summary

STEPS, FROM, LOOKS = 220, 80, 24
_FOREIGN = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, io.IOBase, int, float)
"""Not walked through: what leads to all that the process has loaded, and numbers, of which small ones are shared."""
_RECORDING = (FaultyEngine, FaultyWorker, FakeTrainer, Values)
"""Fakes that record what they are asked."""


def reachable(*roots: object) -> Counter[str]:
    """Objects that can be reached from the roots, by type."""
    seen, todo, counts = set[int](), list(roots), Counter[str]()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (*_FOREIGN, *_RECORDING)):
            continue
        seen.add(id(one))
        counts[type(one).__qualname__] += 1
        todo += gc.get_referents(one)
    return counts


def test_the_driver_keeps_nothing_for_each_step_or_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than two objects for each of 108 steps of five groups, with checkpoints and evaluations."""
    monkeypatch.setattr(run_summary, "_MOST", 8)
    run = RolloutRun(tmp_path, schedule={"steps": STEPS, "max_staleness": 1}, checkpoint={"every_steps": 10})
    run.change(output={"trajectories": True}, evaluation={"every_steps": 20}, data=DATA)
    run.evaluator = Values(*(0.5,) * (STEPS + 1))
    before, after = Counter[str](), Counter[str]()

    async def watched() -> None:
        controller = await run.start()

        async def least(first: int) -> Counter[str]:
            """The fewest objects at the steps from `first` on: what is under way comes and goes, what is kept stays."""
            fewest = Counter[str]()
            for step in range(first, first + LOOKS):
                while controller.version < step:
                    await asyncio.sleep(0)
                found = reachable(controller, run.pool, run.trainer_calls, asyncio.get_running_loop())
                fewest = min(fewest or found, found, key=Counter.total)
            return fewest

        async def watch() -> None:
            nonlocal before, after
            before, after = await least(FROM), await least(STEPS - 8 - LOOKS)

        watching = asyncio.create_task(watch())
        await controller.run()
        await watching

    asyncio.run(watched())
    assert after.total() - before.total() < 2 * (STEPS - 8 - LOOKS - FROM), (after - before).most_common(5)
    states = [path.stat().st_size for path in tmp_path.glob("checkpoints/*/state.json")]
    assert states and max(states) < 2500  # bytes; the names of 900 groups take more

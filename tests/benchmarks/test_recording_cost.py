"""The stopwatches of recording_cost, and its check of the files that a run leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.recording_cost import check
from benchmarks.support.harness import NotCorrect
from benchmarks.support.recording_timers import Stopwatch


class Clock:
    """CPU seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def recorded(out: Path, **steps: range) -> Path:
    """A run folder with files of these steps."""
    for folder, numbers in steps.items():
        (out / folder).mkdir(parents=True)
        for step in numbers:
            (out / folder / f"step-{step:06d}.parquet").touch()
    (out / "events.jsonl").write_text("{}\n{}\n")
    return out


def test_a_coroutine_is_timed_without_its_waits_and_passes_results_and_errors() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    async def other() -> None:
        clock.now += 100.0

    async def work(fails: bool) -> str:
        clock.now += 1.0
        await asyncio.gather(other(), other())
        clock.now += 2.0
        if fails:
            raise ValueError("as planned")
        return "done"

    async def cancelled() -> None:
        task = asyncio.ensure_future(watch.of_coroutine("waits", asyncio.sleep)(1000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def scenario() -> None:
        timed = watch.of_coroutine("work", work)
        assert await timed(False) == "done"
        with pytest.raises(ValueError, match="as planned"):
            await timed(True)
        await cancelled()

    asyncio.run(scenario())
    assert watch.seconds["work"] == 6.0 and watch.seconds["waits"] == 0.0


def test_all_steps_must_be_recorded_of_replay_the_newest(tmp_path: Path) -> None:
    steps = {"trajectories": range(1, 7), "timeline": range(7), "replay": range(4, 7)}
    assert check(recorded(tmp_path / "all", **steps), 6) == (
        "6 steps in trajectories/, 6 steps in timeline/, 3 steps in replay/, 2 events"
    )
    for folder, numbers in (("trajectories", range(1, 6)), ("timeline", range(0)), ("replay", range(1, 3))):
        out = recorded(tmp_path / folder, **(steps | {folder: numbers}))
        with pytest.raises(NotCorrect, match=f"{folder}/ has the steps"):
            check(out, 6)

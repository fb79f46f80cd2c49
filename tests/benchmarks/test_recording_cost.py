"""recording_cost: what it times, and its check of the files that a run leaves."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recording_cost import check
from benchmarks.support.harness import NotCorrect
from benchmarks.support.recording_timers import COROUTINES, FUNCTIONS, time_driver


def recorded(out: Path, **steps: range) -> Path:
    """A run folder with files of these steps."""
    for folder, numbers in steps.items():
        (out / folder).mkdir(parents=True)
        for step in numbers:
            (out / folder / f"step-{step:06d}.parquet").touch()
    (out / "events.jsonl").write_text("{}\n{}\n")
    return out


def test_all_steps_must_be_recorded_of_replay_the_newest(tmp_path: Path) -> None:
    steps = {"trajectories": range(1, 7), "timeline": range(7), "replay": range(4, 7)}
    assert check(recorded(tmp_path / "all", **steps), 6) == (
        "6 steps in trajectories/, 6 steps in timeline/, 3 steps in replay/, 2 events"
    )
    for folder, numbers in (("trajectories", range(1, 6)), ("timeline", range(0)), ("replay", range(1, 3))):
        out = recorded(tmp_path / folder, **(steps | {folder: numbers}))
        with pytest.raises(NotCorrect, match=f"{folder}/ has the steps"):
            check(out, 6)


def test_the_functions_that_are_timed_exist_and_return_what_they_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named by strings, which no type checker follows."""
    before: dict[tuple[Any, str], Any] = {}
    for owner, name, _ in (*FUNCTIONS, *COROUTINES):
        assert inspect.iscoroutinefunction(getattr(owner, name)) == ((owner, name) in {one[:2] for one in COROUTINES})
        before[owner, name] = getattr(owner, name)
        monkeypatch.setattr(owner, name, before[owner, name])  # restored after the test
    time_driver()
    for (owner, name), function in before.items():
        assert inspect.unwrap(getattr(owner, name)) is function is not getattr(owner, name)

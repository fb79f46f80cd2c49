"""Evaluations that training does not wait for: what a run writes, keeps and resumes when their results are late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.test_best_checkpoint import DATA, EvaluatedRun, Values, run_of, steps_of
from troupe.orchestrator.controller import Controller
from troupe.orchestrator.errors import EvaluationLost, WorkerError
from troupe.orchestrator.runs.checkpoints import best_step
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.training.checkpoint import CheckpointStore


class Beside:
    """Evaluations with these values by step, each of which ends once `late` further steps are trained."""

    def __init__(self, run: BesideRun, values: tuple[float, ...], late: int) -> None:
        self._run = run
        self._values = values
        self._late = late
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.lose: set[int] = set()
        self.busy: set[int] = set()
        """Steps at which no engine is free."""
        self.fails: set[int] = set()

    async def begin(self, step: int) -> Coroutine[Any, Any, dict[str, float]] | None:
        if step in self.busy:
            return None
        self.begun.append(step)
        return self._evaluate(step)

    async def _evaluate(self, step: int) -> dict[str, float]:
        controller = self._run.controller
        try:
            # A loop that waits for this evaluation trains no further steps.
            while controller.version < step + self._late and step not in self._run.waited:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(step)
            raise
        if step in self.lose:
            self.lose.remove(step)
            raise EvaluationLost("rollout-1 is lost")
        if step in self.fails:
            raise WorkerError("reward-0", "score", "it failed")
        return {"eval/prompts": 4.0, "eval/reward": self._values[step]}


class BesideRun(EvaluatedRun):
    """A run whose evaluations end late."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.values: tuple[float, ...] = ()
        self.late = 2
        self.waited: list[int] = []
        """Steps whose evaluations the loop has waited for."""
        self.prepare: Callable[[Beside], None] = lambda _: None

    def build(self) -> Controller:
        controller = super().build()
        shown = controller.console.phase

        def phase(name: str, *parts: int, waiting_for: str = "", unit: str = "") -> None:
            if waiting_for.startswith("the evaluation of step "):
                self.waited.append(int(waiting_for.rpartition(" ")[2]))
            shown(name, *parts, waiting_for=waiting_for, unit=unit)

        controller.console.phase = phase  # pyright: ignore[reportAttributeAccessIssue]
        return controller

    def beside(self) -> Beside:
        self.evaluations = Beside(self, self.values, self.late)
        self.prepare(self.evaluations)
        return self.evaluations


def run(out: Path, *values: float, late: int = 2, resume: bool = False, every: int = 1, **checkpoint: Any) -> BesideRun:
    """A run of as many steps as there are values after the first, evaluated before the first one and after each."""
    found = BesideRun(
        out,
        resume=resume,
        schedule={"steps": len(values) - 1},
        checkpoint={"every_steps": 0, "keep": 1, "best": {"metric": "eval/reward"}} | checkpoint,
        roles={"rollout": {"workers": 2}},
        evaluation={"every_steps": every, "beside": True},
        data=DATA,
        failures={"failed_saves": 3},
    )
    found.values, found.late = values, late
    found.evaluator = Values(*values)
    return found


def lines(out: Path) -> list[tuple[int, float | None]]:
    """Step and value of every line of the metrics."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("eval/reward")) for line in found]


def merged(out: Path) -> list[tuple[int, float | None]]:
    """The same, as every reader sees them."""
    return [(line["step"], line.get("eval/reward")) for line in RunFolder(out).metrics()]


VALUES = (0.1, 0.3, 0.5, 0.2, 0.4, 0.6, 0.7)


def test_an_evaluation_that_ends_late_belongs_to_the_step_that_it_is_about(tmp_path: Path) -> None:
    """Its line follows that of a later step; readers see one line for each step, in order."""
    beside = run(tmp_path, *VALUES, every=3, best=None)
    outcome = beside.run()
    assert lines(tmp_path) == [(1, None), (0, 0.1), (2, None), (3, None), (4, None), (3, 0.2), (5, None), (6, 0.7)]
    assert merged(tmp_path) == [(0, 0.1), (1, None), (2, None), (3, 0.2), (4, None), (5, None), (6, 0.7)]
    assert beside.evaluations.begun == [0, 3] and beside.waited == []
    assert beside.evaluator.steps == [6]  # type: ignore[union-attr]
    assert (outcome.first_eval["eval/reward"], outcome.last_eval["eval/reward"]) == (0.1, 0.7)


def test_the_next_evaluation_waits_for_the_one_before(tmp_path: Path) -> None:
    beside = run(tmp_path, *VALUES, best=None, late=3)
    beside.run()
    assert beside.evaluations.begun == [0, 1, 2, 3, 4, 5]
    assert beside.waited == [0, 1, 2, 3, 4, 5]
    assert merged(tmp_path) == list(enumerate(VALUES))


def test_without_a_free_engine_training_waits_as_it_does_without_this(tmp_path: Path) -> None:
    beside = run(tmp_path, *VALUES, every=3, best=None)
    beside.prepare = lambda evaluations: evaluations.busy.update({0, 3})
    beside.run()
    assert beside.evaluator.steps == [0, 3, 6]  # type: ignore[union-attr]
    assert lines(tmp_path)[:4] == [(0, 0.1), (1, None), (2, None), (3, 0.2)]


@pytest.mark.parametrize("late", [1, 3])
def test_the_best_checkpoints_are_those_of_a_run_that_waits(tmp_path: Path, late: int) -> None:
    """Whatever ends when: the step was saved while its evaluation ran, and stays only if it is among the best."""
    values = (0.1, 0.3, 0.9, 0.2, 0.95, 0.6, 0.7, 0.1, 0.5)
    for mode, keep in (("max", 1), ("max", 2), ("min", 2)):
        best = {"metric": "eval/reward", "mode": mode, "keep": keep}
        waits = run_of(tmp_path / f"waits-{mode}-{keep}", *values, best=best)
        waits.change(evaluation={"every_steps": 2}, roles={"rollout": {"workers": 2}})
        expected = waits.run()
        out = tmp_path / f"{mode}-{keep}"
        outcome = run(out, *values, late=late, every=2, best=best).run()
        assert outcome.best.model_copy(update={"held_out": ""}) == expected.best.model_copy(update={"held_out": ""})
        assert steps_of(out) == steps_of(waits.out)
        assert best_step(out / "checkpoints") == best_step(waits.out / "checkpoints")


def test_a_candidate_that_is_not_saved_is_none_of_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = CheckpointStore.commit

    def failing(self: CheckpointStore, path: Path, state: dict[str, Any]) -> Any:
        if state["step"] == 4:
            self.discard(path)
            raise OSError(28, "no space left", str(path))
        return commit(self, path, state)

    monkeypatch.setattr(CheckpointStore, "commit", failing)
    outcome = run(tmp_path, *(0.1, 0.1, 0.5, 0.1, 0.9, 0.1, 0.2, 0.1, 0.3), every=2).run()
    assert [one.step for one in outcome.best.steps] == [2]
    assert outcome.best.value == 0.9  # as where training waits: later ones have to be better than this
    assert steps_of(tmp_path) == [2, 8]


def test_patience_counts_evaluations_and_ends_the_run_when_the_last_of_them_has_ended(tmp_path: Path) -> None:
    """That of step 6 is the second without a gain, and ends while step 7 is made, which is evaluated at the end."""
    values = (0.1, 0, 0.5, 0, 0.4, 0, 0.3, 0.2, 0.2, 0, 0.1)
    outcome = run(tmp_path, *values, every=2, patience=2, late=1).run()
    assert outcome.steps_done == 7 and not outcome.stopped
    assert outcome.ended_early == "no gain of eval/reward in 3 evaluations (checkpoint.patience)"
    assert steps_of(tmp_path) == [2, 7]
    assert merged(tmp_path)[-1] == (7, 0.2)
    assert outcome.summary(tmp_path)["held-out reward"] == "0.100 before, 0.200 after"


def test_a_run_whose_newest_model_is_a_gain_does_not_end_early(tmp_path: Path) -> None:
    values = (0.1, 0, 0.5, 0, 0.4, 0, 0.3, 0.6, 0.2, 0, 0.1)
    outcome = run(tmp_path, *values, every=2, patience=2, late=1).run()
    assert (outcome.steps_done, outcome.ended_early) == (
        10,
        "",
    )


def test_without_an_evaluation_at_the_end_the_summary_says_of_which_step_it_is(tmp_path: Path) -> None:
    beside = run(tmp_path, *(0.1, 0, 0.5, 0, 0.4, 0, 0.3, 0.6, 0.2), every=2, patience=2, late=1)
    beside.change(evaluation={"every_steps": 2, "beside": True, "at_end": False})
    outcome = beside.run()
    assert (outcome.steps_done, outcome.stopped) == (7, False)
    assert outcome.summary(tmp_path)["held-out reward"] == "0.100 before, 0.300 after step 6"


def test_a_checkpoint_of_a_later_step_waits_for_the_evaluation(tmp_path: Path) -> None:
    """No checkpoint lacks an evaluation that a resumed run could not make: its weights are only in an engine."""
    beside = run(tmp_path, *VALUES, 0.8, 0.9, every=4, best=None, every_steps=5, late=3)
    beside.run()
    assert beside.waited == [4]
    assert lines(tmp_path)[-5:] == [(5, None), (4, 0.4), (6, None), (7, None), (8, 0.9)]


def states(out: Path) -> dict[int, bool]:
    """Which checkpoints say that the evaluation of their step is due."""
    folder = out / "checkpoints"
    files = {step: folder / f"step-{step:06d}" / "state.json" for step in steps_of(out)}
    return {step: json.loads(file.read_text())["parts"]["evaluations"]["due"] for step, file in files.items()}


def test_a_run_that_is_stopped_during_an_evaluation_makes_it_when_it_is_resumed(tmp_path: Path) -> None:
    """Of its last step: it is given up, and the checkpoint says so. Of an earlier one: it is waited for."""
    first = run(tmp_path, *VALUES, every=3, late=99)
    outcome = first.run_until(3)
    assert outcome.stopped and outcome.steps_done == 3
    assert first.evaluations.cancelled == [3] and first.waited == [0]
    assert states(tmp_path) == {3: True}
    assert merged(tmp_path) == [(0, 0.1), (1, None), (2, None), (3, None)]
    again = run(tmp_path, *VALUES, every=3, resume=True)
    again.run()
    assert again.evaluations.begun == [3]
    assert merged(tmp_path) == [(0, 0.1), (1, None), (2, None), (3, 0.2), (4, None), (5, None), (6, 0.7)]
    assert again.controller.parts.best.state.steps[0].step == 6 and states(tmp_path) == {6: False}

    early = run(tmp_path / "early", *VALUES, every=3, late=99)
    assert early.run_until(4).stopped
    assert early.waited == [0, 3] and early.evaluations.cancelled == []
    assert merged(early.out)[3] == (3, 0.2) and states(early.out) == {3: True, 4: False}


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_resumed_run_may_wait_for_evaluations_or_have_none(tmp_path: Path, *, evaluates: bool) -> None:
    run(tmp_path, *VALUES, every=3, late=99, best=None).run_until(3)
    assert states(tmp_path) == {3: True}
    again = run_of(tmp_path, *VALUES, resume=True, best=None)
    again.change(evaluation={"every_steps": 3})
    if not evaluates:
        again.spec = again.spec.model_copy(update={"evaluation": None})
    again.run()
    assert again.evaluator.steps == ([3, 6] if evaluates else [])  # type: ignore[union-attr]
    assert merged(tmp_path)[3] == (3, 0.2 if evaluates else None)


def kill(run: BesideRun, version: int) -> None:
    """Run, and end it while the step behind this version is made: nothing is saved then, as after SIGKILL."""

    async def killed() -> None:
        task = asyncio.create_task((await run.start()).run())
        while run.controller.version < version:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(killed())


def test_a_run_that_was_killed_makes_the_evaluations_that_it_had_not_finished(tmp_path: Path) -> None:
    """Whatever was running: every evaluation is there after the resumption, as in a run that nothing has ended."""
    whole = run(tmp_path / "whole", *VALUES, every=2, every_steps=1)
    whole.run()
    for kill_at in (2, 3, 4):
        out = tmp_path / str(kill_at)
        kill(run(out, *VALUES, every=2, every_steps=1), kill_at)
        again = run(out, *VALUES, every=2, every_steps=1, resume=True)
        again.run()
        assert merged(out) == merged(whole.out)
        assert again.controller.parts.best.state == whole.controller.parts.best.state
        assert steps_of(out) == steps_of(whole.out)


def test_a_lost_evaluation_is_made_after_the_next_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That of step 2 is lost while step 4 is made; the regular one of step 4 has not begun, and that of 5 makes up."""
    beside = run(tmp_path, *VALUES, every=3, late=1, best=None)
    beside.prepare = lambda evaluations: evaluations.lose.add(3)
    beside.run()
    assert beside.evaluations.begun == [0, 3, 5]
    assert "the evaluation of step 3 is lost: rollout-1 is lost; evaluating after the next step" in caplog.text
    assert merged(tmp_path) == [(0, 0.1), (1, None), (2, None), (3, None), (4, None), (5, 0.6), (6, 0.7)]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(one["of"], one["ok"]) for one in events if one["event"] == "evaluation"] == [
        (0, True),
        (3, False),
        (5, True),
    ]


def test_an_evaluation_that_fails_ends_the_run(tmp_path: Path) -> None:
    """As one that training waits for."""
    beside = run(tmp_path, *VALUES, every=3, late=1, best=None)
    beside.prepare = lambda evaluations: evaluations.fails.add(3)
    with pytest.raises(WorkerError, match="it failed"):
        beside.run()
